#include "schedule/order/prediction.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "schedule/order/predicted_order.h"

namespace thinwire {

Prediction::Tensor* Prediction::Step::Find(uint64_t id) {
  const size_t* const at = index.Find(id);
  return at == nullptr ? nullptr : &tensors[*at];
}

// Keeps the memory, which the step after the next fills again.
void Prediction::Step::Clear(double now) {
  for (const Tensor& tensor : tensors) index.Erase(tensor.report.id());
  tensors.clear();
  begin = now;
}

Prediction::Tensor* Prediction::Find(uint64_t id) {
  Tensor* const ended = ended_.Find(id);
  return ended != nullptr ? ended : current_.Find(id);
}

void Prediction::Spend(double now) {
  if (unfinished_ > 0) busy_ += now - counted_until_;
  counted_until_ = now;
}

void Prediction::OnSubmitted(const Report& report, double now) {
  Spend(now);
  if (report.direct != 0 || Find(report.id()) != nullptr) return;
  if (current_.tensors.size() == kMaxTensors) {
    unfinished_ = 0;
    current_.Clear(now);
  }
  current_.index.Insert(report.id()) = current_.tensors.size();
  current_.tensors.push_back({report});
}

void Prediction::OnReady(uint64_t id, double now) {
  Spend(now);
  Tensor* const tensor = Find(id);
  if (tensor == nullptr || tensor->ready >= 0.0) return;
  tensor->ready = now;
  ++unfinished_;
}

void Prediction::OnDone(uint64_t id, double now) {
  OnReady(id, now);  // the last rank's report may be slower than its bytes
  Tensor* const tensor = Find(id);
  if (tensor == nullptr || tensor->done) return;
  tensor->done = true;
  carried_ += static_cast<double>(tensor->report.numel);
  unfinished_ = std::max(0, unfinished_ - 1);
}

void Prediction::EndStep(double now) {
  Spend(now);
  for (const Tensor& tensor : ended_.tensors) {
    // Nobody asks for it any more.
    if (tensor.ready >= 0.0 && !tensor.done) unfinished_ = std::max(0, unfinished_ - 1);
  }
  std::swap(ended_, current_);
  current_.Clear(now);
  carried_ /= 2;
  busy_ /= 2;
  waiting_ = !ended_.tensors.empty();
}

Prediction::NextStep Prediction::Next() {
  const auto late = [](const Tensor& tensor) { return tensor.ready < 0.0; };
  if (!waiting_ || std::any_of(ended_.tensors.begin(), ended_.tensors.end(), late)) return {};
  waiting_ = false;
  std::unordered_map<uint64_t, int> calls;  // by key
  for (const Tensor& tensor : ended_.tensors) ++calls[tensor.report.key];
  const double seconds_per_element = carried_ > 0.0 ? busy_ / carried_ : 0.0;
  std::vector<ExpectedTensor> expected;
  NextStep step;
  for (const Tensor& tensor : ended_.tensors) {
    // If a name was used several times, nobody knows which of them the next call will be.
    if (calls[tensor.report.key] > 1) continue;
    if (tensor.report.op == kDividedByCaller) continue;  // the next call's divisor is not known
    const double length = seconds_per_element * static_cast<double>(tensor.report.numel);
    expected.push_back(
        {tensor.ready - ended_.begin, length, tensor.report.priority, tensor.report.chunks});
    Report next = tensor.report;
    ++next.call;
    step.tensors.push_back(next);
  }
  for (const ChunkOfStep& chunk : PredictOrder(expected, policy_)) {
    const Report& report = step.tensors[chunk.tensor];
    step.chunks.push_back({report.id(), chunk.chunk, 0, report.partition_hash});
  }
  return step;
}

}  // namespace thinwire
