// StoreMode: when a push to the store is applied and when a pull is answered. The workers' numbers
// and the rules are in ledger.h.
#ifndef THINWIRE_SCHEDULE_STORE_MODE_H_
#define THINWIRE_SCHEDULE_STORE_MODE_H_

#include <chrono>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace thinwire {

// Numbers of workers are below it, those of workers that come later as well.
inline constexpr int kMaxStoreWorkers = 4096;

struct StoreMode {
  enum class Kind {
    kSync,    // a step is applied when every worker has pushed it
    kAsync,   // a push is applied when it arrives
    kSsp,     // as async, but no gradient is applied that is older than staleness * workers updates
    kQuorum,  // a round is applied when every worker has pushed to it; or when some have, and a
              // time has passed since then. An update is the weighted mean of what is there.
  };

  Kind kind = Kind::kSync;
  int staleness = 0;                   // kSsp: at least 1
  int quorum = 0;                      // kQuorum: workers that have pushed to a round, at least 1
  std::chrono::milliseconds grace{0};  // kQuorum: that a round waits for the others from then on

  // Parses "sync", "async", "ssp:staleness=2" or "sync:quorum=2,grace=0.5", with the grace in
  // seconds. InvalidArgument says what was expected.
  static absl::StatusOr<StoreMode> Parse(std::string_view text);
  std::string ToString() const;

  // All workers take as many steps: an update is of those that have taken one.
  bool has_steps() const { return kind == Kind::kSync || kind == Kind::kQuorum; }
  // A worker that is gone does not stop the others.
  bool goes_on_without() const { return kind != Kind::kSync; }
  friend bool operator==(const StoreMode&, const StoreMode&) = default;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_MODE_H_
