// Board: what ranks tell one another by the store while they agree on an optional data plane.
#ifndef THINWIRE_TRANSPORT_BOARD_H_
#define THINWIRE_TRANSPORT_BOARD_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/membership.h"
#include "transport/store.h"

namespace thinwire {

using Answers = std::vector<absl::StatusOr<std::string>>;  // by rank

struct Board {
  std::string subject;  // what is agreed on, such as "UCX"
  Membership members;
  Store& store;  // must outlive this
  std::string prefix;
  Deadline deadline;
};

// Every rank gives its answer, any bytes or a failure, and gets everybody's, the same on all ranks.
// A topic is used once. DeadlineExceeded names a rank that gave none.
absl::StatusOr<Answers> TellAll(const Board& board, std::string_view topic,
                                const absl::StatusOr<std::string>& mine);

// OK, or Unimplemented for the first rank that answered with a failure.
absl::Status FirstRefusal(const Board& board, const Answers& answers);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_BOARD_H_
