// ControlTree: by which ranks reports go to rank 0 and its announcements come back. In a small
// world everybody talks to rank 0. In a large one ranks form groups of about sqrt(n) neighbours,
// and the first of each group, its head, speaks for it; so rank 0 has about 2 sqrt(n) frames to
// handle for a tensor, in place of 2 (n - 1).
#ifndef THINWIRE_SCHEDULE_ORDER_CONTROL_TREE_H_
#define THINWIRE_SCHEDULE_ORDER_CONTROL_TREE_H_

#include <vector>

#include "absl/status/statusor.h"
#include "schedule/order/frames.h"
#include "schedule/recycled.h"
#include "transport/membership.h"

namespace thinwire {

class ControlTree {
 public:
  // `from`: the least number of ranks that form groups.
  ControlTree(const Membership& members, int from);

  int head() const { return HeadOf(members_.rank); }
  bool is_head() const { return head() == members_.rank; }
  int HeadOf(int rank) const { return rank / group_ * group_; }
  // The rank that passes on what rank 0 says: the head of the group; heads hear it from rank 0.
  int parent() const { return is_head() ? 0 : head(); }
  // The ranks of a head's group, itself included.
  std::vector<int> GroupOf(int head) const;

  // Whom this rank passes rank 0's words on to: ranks, or kEveryone in a small world.
  const std::vector<int>& children() const { return children_; }

 private:
  const Membership members_;
  const int group_;
  std::vector<int> children_;
};

// The book of a head: which ranks of its group have reported what. Pure logic, not thread-safe.
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

#endif  // THINWIRE_SCHEDULE_ORDER_CONTROL_TREE_H_
