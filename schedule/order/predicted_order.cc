#include "schedule/order/predicted_order.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <tuple>

namespace thinwire {
namespace {

// Less goes first.
std::tuple<double, double, uint32_t> RankOf(const ExpectedTensor& tensor, uint32_t index,
                                            Policy policy) {
  switch (policy) {
    case Policy::kFifo: return {index, 0.0, index};
    case Policy::kWfbp: return {tensor.ready_s, 0.0, index};
    case Policy::kP3: return {tensor.priority, tensor.ready_s, index};
  }
  return {0.0, 0.0, index};
}

}  // namespace

std::vector<ChunkOfStep> PredictOrder(std::span<const ExpectedTensor> tensors, Policy policy) {
  std::vector<uint32_t> by_ready(tensors.size());
  std::iota(by_ready.begin(), by_ready.end(), 0u);
  std::stable_sort(by_ready.begin(), by_ready.end(),
                   [&](uint32_t a, uint32_t b) { return tensors[a].ready_s < tensors[b].ready_s; });
  const auto later = [&](uint32_t a, uint32_t b) {
    return RankOf(tensors[a], a, policy) > RankOf(tensors[b], b, policy);
  };
  std::priority_queue<uint32_t, std::vector<uint32_t>, decltype(later)> ready(later);
  std::vector<uint32_t> sent(tensors.size());
  std::vector<ChunkOfStep> order;
  double now = 0.0;
  size_t next = 0;
  while (next < by_ready.size() || !ready.empty()) {
    if (ready.empty()) now = std::max(now, tensors[by_ready[next]].ready_s);
    while (next < by_ready.size() && tensors[by_ready[next]].ready_s <= now) {
      ready.push(by_ready[next++]);
    }
    const uint32_t first = ready.top();
    const ExpectedTensor& tensor = tensors[first];
    order.push_back({first, sent[first]++});
    now += tensor.length_s / tensor.chunks;
    if (sent[first] == tensor.chunks) ready.pop();
  }
  return order;
}

}  // namespace thinwire
