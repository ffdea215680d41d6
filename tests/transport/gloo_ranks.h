// Ranks of one process connected by Gloo, and a way to hold up a rank's loop.
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

// Holds up the loop, like a machine without a free processor.
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

// By rank. A rank's links are its control plane. They may be destroyed early, after the data plane.
struct GlooRanks {
  std::vector<std::unique_ptr<GlooLinks>> links;
  std::vector<std::unique_ptr<DataPlane>> data;

  // last_words: how long destroyed links wait for their frames to leave.
  explicit GlooRanks(int world,
                     std::chrono::milliseconds last_words = std::chrono::milliseconds(200))
      : links(ConnectGlooLinks(world, last_words)) {
    for (const auto& own : links) data.push_back(GlooDataOver(*own));
  }
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_GLOO_RANKS_H_
