// Agreement: whether two ranks mean the same tensor.
#ifndef THINWIRE_SCHEDULE_ORDER_AGREEMENT_H_
#define THINWIRE_SCHEDULE_ORDER_AGREEMENT_H_

#include <string>

#include "absl/status/status.h"
#include "schedule/order/frames.h"

namespace thinwire {

// "1024 elements of fp32 in the shape 32x32, mean".
std::string DescribeReport(const Report& report);

// FailedPrecondition when `rank` describes the tensor otherwise than `first_rank` did.
absl::Status CheckAgreement(int first_rank, const Report& first, int rank, const Report& report);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_AGREEMENT_H_
