// GroupReports: the book of a group's head (control_tree.h): which of its ranks have reported what.
// Pure logic. Not thread-safe.
#ifndef THINWIRE_SCHEDULE_ORDER_GROUP_REPORTS_H_
#define THINWIRE_SCHEDULE_ORDER_GROUP_REPORTS_H_

#include "absl/status/statusor.h"
#include "schedule/order/agreement.h"
#include "schedule/recycled_map.h"

namespace thinwire {

class GroupReports {
 public:
  explicit GroupReports(int ranks) : ranks_(ranks) {}

  // Each rank reports a tensor once. True if all of the group have reported it now, after which
  // nothing is known of it; FailedPrecondition as CheckAgreement.
  absl::StatusOr<bool> Add(int rank, const Report& report) {
    Tensor* tensor = tensors_.Find(report.id());
    if (tensor == nullptr) {
      tensor = &tensors_.Insert(report.id());
      *tensor = {report, rank, 0};
    }
    absl::Status differs = CheckAgreement(tensor->first_rank, tensor->first, rank, report);
    if (!differs.ok()) return differs;
    const bool all = ++tensor->reports == ranks_;
    if (all) tensors_.Erase(report.id());
    return all;
  }

 private:
  struct Tensor {
    Report first;  // as the first rank reported it
    int first_rank = 0;
    int reports = 0;
  };

  const int ranks_;
  RecycledMap<Tensor> tensors_;  // by id
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_GROUP_REPORTS_H_
