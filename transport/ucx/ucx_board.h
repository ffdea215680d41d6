// What ranks tell one another by the store while they agree on UCX.
#ifndef THINWIRE_TRANSPORT_UCX_UCX_BOARD_H_
#define THINWIRE_TRANSPORT_UCX_UCX_BOARD_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/ucx/ucx.h"

namespace thinwire {

using UcxAnswers = std::vector<absl::StatusOr<std::string>>;  // by rank

// Every rank gives its answer, any bytes or a failure, and gets everybody's, the same on all ranks.
// DeadlineExceeded names a rank that gave none.
absl::StatusOr<UcxAnswers> TellAll(const UcxOptions& options, std::string_view topic,
                                   const absl::StatusOr<std::string>& mine);

// OK, or Unimplemented for the first rank that answered with a failure.
absl::Status FirstRefusal(const UcxAnswers& answers);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_UCX_UCX_BOARD_H_
