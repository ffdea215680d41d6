#include "schedule/order/prediction.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "schedule/order/predicted_order.h"

namespace thinwire {
namespace {

constexpr double kSlower = 1.125;  // in a step: what once was the least time may not come again

}  // namespace

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
  if (++unfinished_ > 1) return;
  filling_ += chunk_s_;
  if (chunk_s_ > 0.0) first_ += static_cast<double>(tensor->report.numel) / tensor->report.chunks;
}

void Prediction::OnDone(uint64_t id, double now) {
  OnReady(id, now);  // the last rank's report may be slower than its bytes
  Tensor* const tensor = Find(id);
  if (tensor == nullptr || tensor->done) return;
  tensor->done = true;
  carried_ += static_cast<double>(tensor->report.numel);
  unfinished_ = std::max(0, unfinished_ - 1);
}

void Prediction::OnChunkDone(double started, double now) {
  step_chunk_s_ = std::min(step_chunk_s_, now - started);
}

// Where the link was hardly busy for longer than it fills, the rest says nothing of its rate.
double Prediction::bytes_per_s() const {
  if (busy_ <= 0.0) return 0.0;
  const bool known = busy_ - filling_ > busy_ / 4 && carried_ - first_ > carried_ / 4;
  const double elements_per_s = known ? (carried_ - first_) / (busy_ - filling_) : carried_ / busy_;
  return elements_per_s * sizeof(float);
}

void Prediction::EndStep(double now) {
  Spend(now);
  if (step_chunk_s_ != kNever) {
    chunk_s_ = chunk_s_ == 0.0 ? step_chunk_s_ : std::min(step_chunk_s_, kSlower * chunk_s_);
  }
  step_chunk_s_ = kNever;
  for (const Tensor& tensor : ended_.tensors) {
    // Nobody asks for it any more.
    if (tensor.ready >= 0.0 && !tensor.done) unfinished_ = std::max(0, unfinished_ - 1);
  }
  std::swap(ended_, current_);
  current_.Clear(now);
  carried_ /= 2;
  busy_ /= 2;
  first_ /= 2;
  filling_ /= 2;
  waiting_ = !ended_.tensors.empty();
}

Prediction::NextStep Prediction::Next() {
  const auto late = [](const Tensor& tensor) { return tensor.ready < 0.0; };
  if (!waiting_ || std::any_of(ended_.tensors.begin(), ended_.tensors.end(), late)) return {};
  waiting_ = false;
  std::unordered_map<uint64_t, int> calls;  // by key
  for (const Tensor& tensor : ended_.tensors) ++calls[tensor.report.key];
  const double rate = bytes_per_s();
  const double seconds_per_element = rate > 0.0 ? sizeof(float) / rate : 0.0;
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
