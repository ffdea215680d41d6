#include "schedule/order/peers.h"

#include <algorithm>
#include <cmath>

#include "schedule/order/outbox.h"

namespace thinwire {
namespace {

int GroupSize(int world, int from) {
  if (world < from) return world;
  return static_cast<int>(std::ceil(std::sqrt(static_cast<double>(world))));
}

}  // namespace

ControlTree::ControlTree(const Membership& members, int from)
    : members_(members), group_(GroupSize(members.size, from)) {
  if (!is_head()) return;
  if (group_ == members.size) {
    children_ = {kEveryone};
    return;
  }
  for (const int rank : GroupOf(members.rank)) {
    if (rank != members.rank) children_.push_back(rank);
  }
  for (int head = group_; members.rank == 0 && head < members.size; head += group_) {
    children_.push_back(head);
  }
}

std::vector<int> ControlTree::GroupOf(int head) const {
  std::vector<int> ranks;
  for (int r = head; r < std::min(head + group_, members_.size); ++r) ranks.push_back(r);
  return ranks;
}

}  // namespace thinwire
