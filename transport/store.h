// Store: a key-value board on which ranks find each other. Torch's rendezvous store, a folder, or
// a map in this process can serve. Clock and Deadline are what all waits go by.
#ifndef THINWIRE_TRANSPORT_STORE_H_
#define THINWIRE_TRANSPORT_STORE_H_

#include <chrono>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace thinwire {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// The time left until a deadline, for absl::CondVar::WaitWithTimeout. That converts it to the
// system's clock, which may jump, so a wait that timed out has passed its deadline only if Clock
// says so too.
inline absl::Duration TimeLeft(Deadline deadline) {
  return absl::FromChrono(deadline - Clock::now());
}

// Thread-safe. Keys are written once.
class Store {
 public:
  virtual ~Store() = default;
  virtual absl::Status Set(std::string_view key, std::string_view value) = 0;
  // Waits until somebody has set the key; DeadlineExceeded names it.
  virtual absl::StatusOr<std::string> Get(std::string_view key, Deadline deadline) = 0;
};

// Ranks that are threads of one process.
std::shared_ptr<Store> MakeInProcessStore();

// Ranks that share a folder; a key is a file in it, written whole and then renamed.
std::shared_ptr<Store> MakeFileStore(std::string folder);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_STORE_H_
