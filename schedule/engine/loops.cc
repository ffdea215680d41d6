#include "schedule/engine/loops.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "schedule/engine/attendance.h"
#include "transport/board.h"
#include "transport/spread/spread.h"
#include "transport/watched_store.h"

namespace thinwire {

absl::Status AddLoops(int loops, const std::shared_ptr<Store>& store, const ConnectLoop& connect,
                      Deadline deadline, std::chrono::milliseconds timeout, Transport& transport) {
  if (loops == 1) return absl::OkStatus();
  const absl::StatusOr<Deadline> end =
      EarliestDeadline({"loops", transport.members(), transport, 0, deadline});
  if (!end.ok()) return end.status();
  // What ends a wait for a rank that dies; a store does not tell.
  const auto watched = std::make_shared<WatchedStore>(store, *transport.control);
  std::vector<Transport> others;
  for (int loop = 1; loop < loops; ++loop) {
    absl::StatusOr<Transport> other = connect(watched, absl::StrCat("loop", loop), *end);
    if (absl::IsDeadlineExceeded(other.status())) {
      // That names a rank which may itself be waiting for the one that is at fault.
      transport.control->Abort(other.status());
      return LateError(*transport.control, "could not connect all its loops in time", timeout);
    }
    if (!other.ok()) return other.status();
    others.push_back(*std::move(other));
  }
  transport.data = std::make_unique<Spread>(std::move(transport.data), std::move(others));
  return absl::OkStatus();
}

}  // namespace thinwire
