#include "schedule/foresight.h"

#include <algorithm>
#include <utility>

#include "schedule/step_order.h"

namespace thinwire {

Foresight::Tensor* Foresight::Find(uint64_t id) {
  for (Step* step : {&ended_, &current_}) {
    if (const auto found = step->places.find(id); found != step->places.end()) {
      return &step->tensors[found->second];
    }
  }
  return nullptr;
}

void Foresight::Spend(double now) {
  if (unfinished_ > 0) busy_ += now - counted_until_;
  counted_until_ = now;
}

void Foresight::OnSubmitted(const Report& report, double now) {
  Spend(now);
  if (report.raw != 0 || Find(report.id()) != nullptr) return;
  current_.places[report.id()] = current_.tensors.size();
  current_.tensors.push_back({report});
}

void Foresight::OnReady(uint64_t id, double now) {
  Spend(now);
  Tensor* const tensor = Find(id);
  if (tensor == nullptr || tensor->ready >= 0.0) return;
  tensor->ready = now;
  ++unfinished_;
}

void Foresight::OnDone(uint64_t id, double now) {
  OnReady(id, now);  // the last rank's report may be slower than its bytes
  Tensor* const tensor = Find(id);
  if (tensor == nullptr || tensor->done) return;
  tensor->done = true;
  carried_ += static_cast<double>(tensor->report.numel);
  --unfinished_;
}

void Foresight::EndStep(double now) {
  Spend(now);
  for (const Tensor& tensor : ended_.tensors) {
    if (tensor.ready >= 0.0 && !tensor.done) --unfinished_;  // nobody asks for it any more
  }
  ended_ = std::exchange(current_, Step{.begin = now, .tensors = {}, .places = {}});
  carried_ /= 2;
  busy_ /= 2;
  waiting_ = !ended_.tensors.empty();
}

Foresight::Plan Foresight::Next() {
  const auto late = [](const Tensor& tensor) { return tensor.ready < 0.0; };
  if (!waiting_ || std::any_of(ended_.tensors.begin(), ended_.tensors.end(), late)) return {};
  waiting_ = false;
  std::unordered_map<uint64_t, int> calls;  // by key
  for (const Tensor& tensor : ended_.tensors) ++calls[tensor.report.key];
  const double seconds_per_element = carried_ > 0.0 ? busy_ / carried_ : 0.0;
  std::vector<ExpectedTensor> expected;
  Plan plan;
  for (const Tensor& tensor : ended_.tensors) {
    // Of several calls of a name nobody knows which the next one will be.
    if (calls[tensor.report.key] > 1) continue;
    const double length = seconds_per_element * static_cast<double>(tensor.report.numel);
    expected.push_back(
        {tensor.ready - ended_.begin, length, tensor.report.priority, tensor.report.chunks});
    Report next = tensor.report;
    ++next.call;
    plan.tensors.push_back(next);
  }
  for (const ChunkOfStep& chunk : StepOrder(expected, policy_)) {
    const Report& report = plan.tensors[chunk.tensor];
    plan.chunks.push_back({report.id(), chunk.chunk, 0, report.plan_hash});
  }
  return plan;
}

}  // namespace thinwire
