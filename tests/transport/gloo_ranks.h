// Ranks of one process on Gloo's connections, and a way to hold up the loop of one.
#ifndef THINWIRE_TESTS_TRANSPORT_GLOO_RANKS_H_
#define THINWIRE_TESTS_TRANSPORT_GLOO_RANKS_H_

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "tests/transport/connect_gloo.h"
#include "transport/gloo/gloo_connect.h"
#include "transport/gloo/gloo_control.h"
#include "transport/gloo/gloo_shared.h"

namespace thinwire {

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

// By rank.
struct GlooRanks {
  std::vector<std::shared_ptr<GlooShared>> shared;
  std::vector<std::unique_ptr<GlooControl>> controls;

  explicit GlooRanks(int world) {
    for (GlooMesh& mesh : ConnectGlooMeshes(world)) {
      shared.push_back(std::make_shared<GlooShared>(std::move(mesh)));
      controls.push_back(
          std::make_unique<GlooControl>(shared.back(), std::chrono::milliseconds(200)));
    }
  }
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_GLOO_RANKS_H_
