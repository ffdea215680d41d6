// Starts threads, which may fail: a user, a container or a process has a limit on their number.
#ifndef THINWIRE_TRANSPORT_THREADS_H_
#define THINWIRE_TRANSPORT_THREADS_H_

#include <system_error>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace thinwire {

inline absl::Status NoThread(const std::system_error& error) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "this process can't start another thread: ", error.what(),
      "; raise its limits of threads and of memory (ulimit -u, ulimit -v, the pids of ",
      "its container)"));
}

// ResourceExhausted if the system can't start another thread.
template <typename Run>
absl::StatusOr<std::thread> StartThread(Run run) {
  try {
    return std::thread(std::move(run));
  } catch (const std::system_error& error) {
    return NoThread(error);
  }
}

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_THREADS_H_
