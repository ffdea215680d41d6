// Ranks of one process on Gloo's connections, and a way to hold up the loop of one.
#ifndef THINWIRE_TESTS_TRANSPORT_GLOO_RANKS_H_
#define THINWIRE_TESTS_TRANSPORT_GLOO_RANKS_H_

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "tests/transport/connect_gloo.h"
#include "transport/gloo/gloo.h"
#include "transport/gloo/gloo_links.h"

namespace thinwire {

// Holds up the loop, as a machine does that has no processor for it.
class Standstill final {
 public:
  explicit Standstill(GlooLoop& loop) : loop_(loop) {
    loop_.Post([this] { over_.WaitForNotification(); });
  }
  ~Standstill() { End(); }
  void End() {
    if (!over_.HasBeenNotified()) over_.Notify();
    loop_.Sync();
  }

 private:
  GlooLoop& loop_;
  absl::Notification over_;
};

// By rank. A rank's links are its control plane, and may be ended alone once its data plane is.
struct GlooRanks {
  std::vector<std::unique_ptr<GlooLinks>> links;
  std::vector<std::unique_ptr<DataPlane>> data;

  // last_words: how long links that end wait for their frames to leave.
  explicit GlooRanks(int world,
                     std::chrono::milliseconds last_words = std::chrono::milliseconds(200))
      : links(ConnectGlooLinks(world, last_words)) {
    for (const auto& own : links) data.push_back(GlooDataOver(*own));
  }
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_GLOO_RANKS_H_
