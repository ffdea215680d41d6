// AddLoops: more threads that move a rank's bytes, each with connections of its own.
#ifndef THINWIRE_SCHEDULE_ENGINE_LOOPS_H_
#define THINWIRE_SCHEDULE_ENGINE_LOOPS_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/transport.h"

namespace thinwire {

// Connects all ranks of the group once more, by a store and under names of this loop's own.
using ConnectLoop = std::function<absl::StatusOr<Transport>(
    std::shared_ptr<Store> store, const std::string& name, Deadline deadline)>;

// Spreads the exchanges of `transport`, whose planes match by tag, over `loops` of its kind, itself
// included; control frames stay with it. All ranks of a group call it with as many loops. A rank
// that dies meanwhile is named within moments, and one that stops when the first rank's deadline
// has passed; ranks are given a 30th of `timeout` to say that they have not. After a failure
// `transport` is there still, for whoever tells the others.
absl::Status AddLoops(int loops, const std::shared_ptr<Store>& store, const ConnectLoop& connect,
                      Deadline deadline, std::chrono::milliseconds timeout, Transport& transport);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_LOOPS_H_
