// What the control plane over Gloo does when news comes faster than its threads wake.
#include "transport/gloo/gloo_control.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "tests/transport/connect_gloo.h"
#include "transport/gloo/gloo_connect.h"

namespace thinwire {
namespace {

// Holds up the loop, as a machine does that has no processor for it.
class Standstill final : public GlooLoop::Task {
 public:
  explicit Standstill(GlooLoop& loop) : loop_(loop) { loop_.Post(this); }
  ~Standstill() { End(); }
  void End() {
    if (!over_.HasBeenNotified()) over_.Notify();
    loop_.Sync();
  }

 private:
  void Run() override { over_.WaitForNotification(); }

  GlooLoop& loop_;
  absl::Notification over_;
};

TEST(GlooControl, HearsWhatAPeerSaidBeforeItLeft) {
  constexpr int kRounds = 20, kFrames = 10;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<GlooMesh> meshes = ConnectAll<GlooMesh>(2, ConnectFullMesh);
    const auto shared = std::make_shared<GlooShared>(std::move(meshes[0]));
    GlooControl control(shared);
    auto peer = std::make_unique<GlooControl>(std::make_shared<GlooShared>(std::move(meshes[1])));
    // The receives are known at the other end once a frame has come.
    ASSERT_TRUE(peer->Send(0, ControlFrame{}).ok());
    ASSERT_TRUE(control.Receive().ok());

    Standstill standstill(shared->loop());
    for (int i = 1; i <= kFrames; ++i) {
      ControlFrame frame{};
      frame[0] = static_cast<uint8_t>(i);
      ASSERT_TRUE(peer->Send(0, frame).ok());
    }
    peer.reset();
    standstill.End();

    for (int i = 1; i <= kFrames; ++i) {
      const absl::StatusOr<ControlMessage> message = control.Receive();
      ASSERT_TRUE(message.ok()) << "round " << round << ", frame " << i << ": " << message.status();
      EXPECT_EQ(message->frame[0], i);
    }
    EXPECT_TRUE(absl::IsUnavailable(control.Receive().status()));
  }
}

}  // namespace
}  // namespace thinwire
