// Handshake: before any connection, all ranks compare what they must agree on.
#ifndef THINWIRE_SCHEDULE_JOIN_HANDSHAKE_H_
#define THINWIRE_SCHEDULE_JOIN_HANDSHAKE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "schedule/join/roster.h"
#include "schedule/options.h"
#include "transport/store.h"

namespace thinwire {

// Everything that must be equal on all ranks, as text: "wire=2 framing=2 world=2 codec=int4 ...".
std::string Digest(int size, const Options& options);

// Which member this rank is, and of which epoch of the group.
struct Seat {
  Member member;
  uint64_t epoch = 0;
};

// Writes the own digest and seat under `prefix`, reads everybody's, and returns who the members
// are. FailedPrecondition names the first rank that differs and in what, the epoch included, or
// those whose roles or indexes do not go together; DeadlineExceeded the rank that never came.
absl::StatusOr<Roster> Handshake(Store& store, const std::string& prefix, int rank, int size,
                                 const Options& options, Deadline deadline, const Seat& seat = {});

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_JOIN_HANDSHAKE_H_
