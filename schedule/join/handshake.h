// Handshake: before any connection, all ranks compare what they must agree on.
#ifndef THINWIRE_SCHEDULE_JOIN_HANDSHAKE_H_
#define THINWIRE_SCHEDULE_JOIN_HANDSHAKE_H_

#include <string>

#include "absl/status/status.h"
#include "schedule/options.h"
#include "transport/store.h"

namespace thinwire {

// Everything that must be equal on all ranks, as text: "wire=2 framing=2 world=2 codec=int4 ...".
std::string Digest(int size, const Options& options);

// Writes the own digest under `prefix` and reads everybody's. FailedPrecondition names the first
// rank that differs and in what; DeadlineExceeded the rank that never came.
absl::Status Handshake(Store& store, const std::string& prefix, int rank, int size,
                       const Options& options, Deadline deadline);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_JOIN_HANDSHAKE_H_
