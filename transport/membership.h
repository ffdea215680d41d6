#ifndef THINWIRE_TRANSPORT_MEMBERSHIP_H_
#define THINWIRE_TRANSPORT_MEMBERSHIP_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace thinwire {

// This process's place in a group. The members are numbered from 0 to size - 1, and nobody joins or
// is renumbered later: a group that loses a member fails.
struct Membership {
  int rank = 0;
  int size = 1;
};

// How the ranks of a data plane that connects by itself learn their peers' addresses: every rank
// tells its own, any bytes up to 4080, or why it has none. Returns all addresses by rank, or
// Unimplemented, which names the first rank that has none, on all of them; Unavailable names a rank
// that is gone, DeadlineExceeded those that told nothing.
using TellAddress = std::function<absl::StatusOr<std::vector<std::string>>(
    const absl::StatusOr<std::string>& mine)>;

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MEMBERSHIP_H_
