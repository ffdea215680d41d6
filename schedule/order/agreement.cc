#include "schedule/order/agreement.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "compress/types.h"

namespace thinwire {
namespace {

bool Agree(const Report& a, const Report& b) {
  return a.numel == b.numel && a.partition_hash == b.partition_hash && a.dtype == b.dtype &&
         a.op == b.op && a.direct == b.direct && a.collective == b.collective &&
         a.chunks == b.chunks;
}

}  // namespace

std::string DescribeReport(const Report& report) {
  constexpr const char* kOps[] = {"mean", "sum", "mean by a divisor of the call"};
  constexpr const char* kCollectives[] = {"", ", reduce-scatter", ", all-gather", ", all-to-all"};
  const std::string shape(ShapeOf(report));
  return absl::StrCat(
      report.numel, " elements of ", std::string(Name(static_cast<DType>(report.dtype))),
      shape.empty() ? "" : " in the shape ", shape, ", ", kOps[std::min<size_t>(report.op, 2)],
      report.collective < 4 ? kCollectives[report.collective] : ", unknown",
      report.direct ? ", in one exchange" : "");
}

absl::Status CheckAgreement(int first_rank, const Report& first, int rank, const Report& report) {
  if (Agree(first, report)) return absl::OkStatus();
  const std::string one = DescribeReport(first), other = DescribeReport(report);
  return absl::FailedPreconditionError(absl::StrCat(
      "tensor '", report.name, "': rank ", first_rank, " has ", one, ", but rank ", rank, " has ",
      other,
      one != other                   ? ""
      : first.op == kDividedByCaller ? " by another divisor, of another shape or in other segments"
                                     : " of another shape or in other segments",
      "; call with the same tensors in the same order on every rank"));
}

}  // namespace thinwire
