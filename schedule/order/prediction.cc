#include "schedule/order/prediction.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace thinwire {
namespace {

// In a step: what once was the least time may not come again. Chunks that queue at the link hide
// it, so a larger factor would take their waiting for a latency, and make the queue longer.
constexpr double kSlower = 1.01;
constexpr double kGrows = 1.2;  // in a step: a rate that had been held back
// Times of a hop that the window has then beside all lanes' chunks, whatever is predicted.
constexpr double kGrowingTimes = 4.0;
constexpr size_t kMaxDelivered = size_t{1} << 16;

}  // namespace

Prediction::Prediction(const Options& options, std::vector<double> hop_shares)
    : policy_(options.policy),
      chunk_bytes_(static_cast<double>(options.chunk_bytes)),
      lanes_bytes_(chunk_bytes_ * options.lanes),
      link_{0.0, std::move(hop_shares)} {
  std::erase(link_.hop_shares, 0.0);  // inside nodes
}

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

void Prediction::OnSubmitted(const Report& report, double now) {
  if (report.direct != 0 || Find(report.id()) != nullptr) return;
  if (current_.tensors.size() == kMaxTensors) current_.Clear(now);
  current_.index.Insert(report.id()) = current_.tensors.size();
  current_.tensors.push_back({report});
}

void Prediction::OnReady(uint64_t id, double now) {
  Tensor* const tensor = Find(id);
  if (tensor != nullptr && tensor->ready < 0.0) tensor->ready = now;
}

void Prediction::OnChunkDone(double started, double now, size_t bytes) {
  step_chunk_s_ = std::min(step_chunk_s_, now - started);
  const double since = started - (now - started);
  const auto later =
      std::upper_bound(delivered_.begin(), delivered_.end(), since,
                       [](double time, const Delivered& entry) { return time < entry.when; });
  const double done = delivered_.back().bytes + static_cast<double>(bytes);
  if (since >= ended_.begin && now > since && later != delivered_.begin()) {
    rates_[0] = std::max(rates_[0], (done - std::prev(later)->bytes) / (now - since));
  }
  if (delivered_.size() == kMaxDelivered) {
    delivered_.erase(delivered_.begin(), delivered_.begin() + kMaxDelivered / 2);
  }
  delivered_.push_back({now, done});
}

double Prediction::bytes_per_s() const { return *std::max_element(rates_, rates_ + 3); }

// All but the last entry until then, which says what was done before.
void Prediction::ForgetBefore(double time) {
  const auto later =
      std::upper_bound(delivered_.begin(), delivered_.end(), time,
                       [](double at, const Delivered& entry) { return at < entry.when; });
  if (later != delivered_.begin()) delivered_.erase(delivered_.begin(), std::prev(later));
}

void Prediction::EndStep(double now) {
  if (step_chunk_s_ != kNever) {
    chunk_s_ = chunk_s_ == 0.0 ? step_chunk_s_ : std::min(step_chunk_s_, kSlower * chunk_s_);
  }
  step_chunk_s_ = kNever;
  std::swap(ended_, current_);
  current_.Clear(now);
  ForgetBefore(ended_.begin);
  growing_ = rates_[0] > kGrows * std::max(rates_[1], rates_[2]);
  rates_[2] = rates_[1];
  rates_[1] = rates_[0];
  rates_[0] = 0.0;
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
  if (expected.empty()) return step;
  double least_s = kNever;  // of a chunk on the link
  for (const ExpectedTensor& tensor : expected) {
    least_s = std::min(least_s, tensor.length_s / tensor.chunks);
  }
  const auto hops = static_cast<double>(link_.hop_shares.size());
  link_.hop_s = std::max(0.0, chunk_s_ - least_s) / hops;
  const double link_s = rate > 0.0 ? chunk_bytes_ / rate : 0.0;
  const PredictedStep predicted = PredictStep(expected, policy_, link_, chunk_s_, link_s);
  // Before anything is known of the link the window is as if it had no latency.
  double window = rate > 0.0 ? predicted.window_s * rate : lanes_bytes_;
  if (growing_) window = std::max(window, lanes_bytes_ + kGrowingTimes * chunk_s_ / hops * rate);
  constexpr double kMost = std::numeric_limits<uint32_t>::max();
  const auto window_kib = static_cast<uint32_t>(std::min(window / 1024, kMost));
  for (const ChunkOfStep& chunk : predicted.order) {
    const Report& report = step.tensors[chunk.tensor];
    step.chunks.push_back({report.id(), chunk.chunk, window_kib, report.partition_hash});
  }
  return step;
}

}  // namespace thinwire
