#ifndef THINWIRE_TRANSPORT_MEMBERSHIP_H_
#define THINWIRE_TRANSPORT_MEMBERSHIP_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace thinwire {

// This process's place in a group. The members are numbered from 0 to size - 1. Nobody joins or is
// renumbered later: a group that loses a member fails.
struct Membership {
  int rank = 0;
  int size = 1;
};

// How the ranks of a data plane that makes its own connections learn their peers' addresses: each
// rank passes its own address (any bytes, at most 4080) or the reason why it has none. Returns all
// addresses by rank. If a rank has none, every rank gets Unimplemented, which names the first such
// rank; Unavailable names a rank that is gone, DeadlineExceeded the ranks that passed nothing.
using TellAddress = std::function<absl::StatusOr<std::vector<std::string>>(
    const absl::StatusOr<std::string>& mine)>;

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MEMBERSHIP_H_
