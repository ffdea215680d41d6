// Ranks of one process on Gloo's connections, and a way to hold up the loop of one.
#ifndef THINWIRE_TESTS_TRANSPORT_GLOO_RANKS_H_
#define THINWIRE_TESTS_TRANSPORT_GLOO_RANKS_H_

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "tests/transport/connect_gloo.h"
#include "transport/gloo/gloo_links.h"
#include "transport/gloo/gloo_planes.h"

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

// By rank.
struct GlooRanks {
  std::vector<std::shared_ptr<GlooLinks>> links;
  std::vector<std::unique_ptr<ControlPlane>> controls;

  // last_words: how long a control plane that ends waits for its frames to leave.
  explicit GlooRanks(int world,
                     std::chrono::milliseconds last_words = std::chrono::milliseconds(200))
      : links(ConnectGlooLinks(world)) {
    for (const std::shared_ptr<GlooLinks>& own : links) {
      controls.push_back(std::move(GlooPlanes(own, last_words).control));
    }
  }
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_GLOO_RANKS_H_
