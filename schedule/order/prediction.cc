#include "schedule/order/prediction.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <numeric>
#include <queue>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "schedule/order/start_queue.h"

namespace thinwire {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
// The windows that are tried hold one chunk plus what the link carries in this many times a hop's
// time; the backlogs that are tried are in chunks. Decision 6 lists the sets that were compared.
constexpr double kHopTimes[] = {0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0};
constexpr double kBacklogs[] = {0.5, 2.0};
// A larger window must end the step earlier by this fraction: it costs memory, and the model is
// rough.
constexpr double kWorthIt = 1e-3;
constexpr double kRounding = 1.0 + 1e-9;  // of sums of times

// Growth of the least time per step, since an old minimum may not be reached again. A larger factor
// would take chunks' waiting at the link for latency, and make the queue longer.
constexpr double kSlower = 1.01;
// A steady rate is measured over at least this many chunks and this part of a step's bytes.
constexpr double kSteadyChunks = 4.0, kSteadyPart = 0.5;
constexpr double kGrows = 1.2;  // growth of the rate in a step, if the window had limited it
// The window is then at least all lanes' chunks plus what the link carries in this many times a
// hop's time.
constexpr double kGrowingTimes = 4.0;
constexpr size_t kMaxDelivered = size_t{1} << 16;

// Sort key of a tensor: the least goes first.
std::tuple<double, double, uint32_t> RankOf(const ExpectedTensor& tensor, uint32_t index,
                                            Policy policy) {
  switch (policy) {
    case Policy::kFifo: return {index, 0.0, index};
    case Policy::kWfbp: return {tensor.ready_s, 0.0, index};
    case Policy::kP3: return {tensor.priority, tensor.ready_s, index};
  }
  return {0.0, 0.0, index};
}

template <typename Less>
std::vector<uint32_t> SortedBy(size_t count, Less less) {
  std::vector<uint32_t> indices(count);
  std::iota(indices.begin(), indices.end(), 0u);
  std::stable_sort(indices.begin(), indices.end(), less);
  return indices;
}

std::vector<uint32_t> ByReady(std::span<const ExpectedTensor> tensors) {
  return SortedBy(tensors.size(),
                  [&](uint32_t a, uint32_t b) { return tensors[a].ready_s < tensors[b].ready_s; });
}

// By tensor: the seconds of computation that follow its last chunk.
std::vector<double> Tails(std::span<const ExpectedTensor> tensors, Policy policy) {
  std::vector<double> tails(tensors.size());
  if (policy != Policy::kP3) return tails;
  const std::vector<uint32_t> by_ready = ByReady(tensors);
  for (size_t i = 1; i < by_ready.size(); ++i) {
    tails[by_ready[i]] = (tensors[by_ready[i]].ready_s - tensors[by_ready[i - 1]].ready_s) / 2;
  }
  double tail = 0.0;
  for (const uint32_t tensor : SortedBy(tensors.size(), [&](uint32_t a, uint32_t b) {
         return tensors[a].priority > tensors[b].priority;
       })) {
    tail = tails[tensor] += tail;
  }
  return tails;
}

// The link, from a chunk's start to its last hop's arrival.
class LinkRun {
 public:
  explicit LinkRun(const ExpectedLink& link) : link_(link), arriving_(link.hop_shares.size()) {}

  // When all queued bytes will have been sent.
  double free_at() const { return free_at_; }
  // Seconds of link time of the hops that are queued or have not arrived.
  double under_way_s() const { return under_way_s_; }

  void Start(double now, uint32_t chunk, double length_s) { Queue(now, {0.0, chunk, length_s}, 0); }

  // The next arrival of a hop; kNever if there is none.
  double next() const {
    double when = kNever;
    for (const auto& queue : arriving_) {
      if (!queue.empty()) when = std::min(when, queue.front().when);
    }
    return when;
  }

  // Moves chunks whose hop has arrived by `now` to their next hop; calls done(chunk, when) for the
  // chunks whose last hop has arrived.
  template <typename Done>
  void Advance(double now, Done done) {
    for (double when = next(); when <= now; when = next()) {
      for (size_t hop = 0; hop < arriving_.size(); ++hop) {
        if (arriving_[hop].empty() || arriving_[hop].front().when > when) continue;
        const Arrival arrival = arriving_[hop].front();
        arriving_[hop].pop_front();
        under_way_s_ -= arrival.length_s * link_.hop_shares[hop];
        if (hop + 1 < arriving_.size()) {
          Queue(when, arrival, hop + 1);
        } else {
          done(arrival.chunk, when);
        }
        break;
      }
    }
  }

 private:
  struct Arrival {
    double when;
    uint32_t chunk;
    double length_s;
  };

  void Queue(double now, Arrival arrival, size_t hop) {
    const double hop_length_s = arrival.length_s * link_.hop_shares[hop];
    under_way_s_ += hop_length_s;
    free_at_ = std::max(free_at_, now) + hop_length_s;
    arrival.when = free_at_ + link_.hop_s;
    arriving_[hop].push_back(arrival);
  }

  const ExpectedLink& link_;
  double free_at_ = 0.0, under_way_s_ = 0.0;
  std::vector<std::deque<Arrival>> arriving_;  // by hop; the earliest first
};

double ChunkLength(const ExpectedTensor& tensor) { return tensor.length_s / tensor.chunks; }

}  // namespace

std::vector<ChunkOfStep> PredictOrder(std::span<const ExpectedTensor> tensors, Policy policy,
                                      const ExpectedLink& link, double backlog_s) {
  const std::vector<uint32_t> by_ready = ByReady(tensors);
  const std::vector<uint32_t> by_done = SortedBy(tensors.size(), [&](uint32_t a, uint32_t b) {
    return tensors[a].done_s < tensors[b].done_s;
  });
  const auto later = [&](uint32_t a, uint32_t b) {
    return RankOf(tensors[a], a, policy) > RankOf(tensors[b], b, policy);
  };
  std::priority_queue<uint32_t, std::vector<uint32_t>, decltype(later)> ready(later);
  std::vector<uint32_t> sent(tensors.size());
  std::vector<ChunkOfStep> order;
  LinkRun run(link);
  double now = 0.0;
  size_t next = 0, over = 0;
  // When the next tensor may come; not before all tensors are sent that were done when it was
  // ready. Those were ready before it, so they are in `ready`.
  const auto comes = [&] {
    if (next == by_ready.size()) return kNever;
    while (over < by_done.size() && sent[by_done[over]] == tensors[by_done[over]].chunks) ++over;
    const double ready_s = tensors[by_ready[next]].ready_s;
    return over < by_done.size() && tensors[by_done[over]].done_s < ready_s ? kNever : ready_s;
  };
  while (next < by_ready.size() || !ready.empty()) {
    while (comes() <= now) ready.push(by_ready[next++]);
    run.Advance(now, [](uint32_t, double) {});
    if (!ready.empty() && run.free_at() <= now + backlog_s) {
      const uint32_t first = ready.top();
      run.Start(now, first, link.slowdown * ChunkLength(tensors[first]));
      order.push_back({first, sent[first]++});
      if (sent[first] == tensors[first].chunks) ready.pop();
      continue;
    }
    double then = run.next();
    if (!ready.empty()) then = std::min(then, run.free_at() - backlog_s);
    then = std::min(then, comes());
    now = std::max(then, std::nextafter(now, kNever));  // whatever the rounding
  }
  return order;
}

double PredictEnd(std::span<const ExpectedTensor> tensors, std::span<const ChunkOfStep> order,
                  Policy policy, const ExpectedLink& link, double window_s) {
  const std::vector<double> tails = Tails(tensors, policy);
  std::vector<uint32_t> left;  // chunks, by tensor
  for (const ExpectedTensor& tensor : tensors) left.push_back(tensor.chunks);
  std::vector<bool> started(order.size()), done(order.size());
  size_t oldest = 0, first = 0;  // the first place not done, and the first not started
  LinkRun run(link);
  double now = 0.0, end = 0.0;
  size_t running = 0;

  // The first chunk that may start now, or when the next one will be ready.
  struct Next {
    size_t place;
    double ready;
  };
  const auto find = [&]() -> Next {
    double soonest = kNever;
    size_t ahead = 0;
    for (size_t place = first; place < order.size() && ahead < StartQueue::kAhead; ++place) {
      if (started[place]) continue;
      ++ahead;
      const ExpectedTensor& tensor = tensors[order[place].tensor];
      if (tensor.ready_s > now) {
        soonest = std::min(soonest, tensor.ready_s);
        continue;
      }
      const double window = ahead > 1 ? window_s / 2 : window_s;  // half for a chunk that overtakes
      const double first_hop = ChunkLength(tensor) * link.hop_shares[0];
      const bool fits = running == 0 || run.under_way_s() + first_hop <= kRounding * window;
      return {place == oldest || fits ? place : order.size(), soonest};
    }
    return {order.size(), soonest};
  };

  while (oldest < order.size()) {
    const Next next = find();
    if (next.place < order.size()) {
      const double length = ChunkLength(tensors[order[next.place].tensor]);
      run.Start(now, static_cast<uint32_t>(next.place), length);
      ++running;
      started[next.place] = true;
      while (first < order.size() && started[first]) ++first;
      continue;
    }
    now = std::max(now, std::min(next.ready, run.next()));
    run.Advance(now, [&](uint32_t place, double when) {
      --running;
      done[place] = true;
      while (oldest < order.size() && done[oldest]) ++oldest;
      const uint32_t tensor = order[place].tensor;
      if (--left[tensor] == 0) end = std::max(end, when + tails[tensor]);
    });
  }
  return end;
}

PredictedStep PredictStep(std::span<const ExpectedTensor> tensors, Policy policy,
                          const ExpectedLink& link, double chunk_s, double link_s) {
  PredictedStep best;
  double best_end = kNever;
  const double hop_s = chunk_s / static_cast<double>(link.hop_shares.size());
  for (const double backlog : kBacklogs) {
    std::vector<ChunkOfStep> order =
        PredictOrder(tensors, policy, link, backlog * link.slowdown * link_s);
    for (const double times : kHopTimes) {
      const double window_s = link_s + times * hop_s;
      const double end = PredictEnd(tensors, order, policy, link, window_s);
      if (end >= (1.0 - kWorthIt) * best_end) continue;
      best_end = end;
      best = {order, window_s};
    }
  }
  return best;
}

Prediction::Prediction(const Options& options, std::vector<double> hop_shares)
    : policy_(options.policy),
      chunk_bytes_(static_cast<double>(options.chunk_bytes)),
      lanes_bytes_(chunk_bytes_ * options.lanes),
      link_{.hop_shares = std::move(hop_shares)} {
  std::erase(link_.hop_shares, 0.0);  // hops inside nodes
}

Prediction::Tensor* Prediction::Find(uint64_t id) {
  for (Step* const step : {&ended_, &current_}) {
    if (const size_t* const at = step->index.Find(id)) return &step->tensors[*at];
  }
  return nullptr;
}

// Restarts the current step, and keeps its memory.
void Prediction::Begin(double now) {
  for (const Tensor& tensor : current_.tensors) current_.index.Erase(tensor.report.id());
  current_.tensors.clear();
  current_.begin = now;
}

void Prediction::OnSubmitted(const Report& report, double now) {
  // The next use without a name may be of another tensor.
  if (report.direct != 0 || report.key == kUnnamedKey || Find(report.id()) != nullptr) return;
  if (current_.tensors.size() == kMaxTensors) Begin(now);
  current_.index.Insert(report.id()) = current_.tensors.size();
  current_.tensors.push_back({report});
}

void Prediction::OnReady(uint64_t id, double now) {
  Tensor* const tensor = Find(id);
  if (tensor != nullptr && tensor->ready < 0.0) tensor->ready = now;
}

void Prediction::OnDone(uint64_t id, double now) {
  OnReady(id, now);
  if (Tensor* const tensor = Find(id)) tensor->done = now;
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
  const double until = done - std::max(kSteadyChunks * chunk_bytes_, kSteadyPart * step_bytes_);
  const auto more =
      std::upper_bound(delivered_.begin(), delivered_.end(), until,
                       [](double limit, const Delivered& entry) { return limit < entry.bytes; });
  if (more != delivered_.begin()) {
    const Delivered& before = *std::prev(more);
    if (before.when >= ended_.begin && now > before.when) {
      steady_rates_[0] = std::max(steady_rates_[0], (done - before.bytes) / (now - before.when));
    }
  }
  if (delivered_.size() == kMaxDelivered) {
    delivered_.erase(delivered_.begin(), delivered_.begin() + kMaxDelivered / 2);
  }
  delivered_.push_back({now, done});
}

double Prediction::bytes_per_s() const { return *std::ranges::max_element(rates_); }

// Erases all entries until `time` except the last one, which says what was done before.
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
  Begin(now);
  ForgetBefore(ended_.begin);
  step_bytes_ = delivered_.back().bytes - bytes_before_;
  bytes_before_ = delivered_.back().bytes;
  growing_ = rates_[0] > kGrows * std::max(rates_[1], rates_[2]);
  for (auto* const rates : {&rates_, &steady_rates_}) {
    std::shift_right(rates->begin(), rates->end(), 1);
    rates->front() = 0.0;
  }
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
    // If a name was used several times, its next call may be any of them.
    if (calls[tensor.report.key] > 1) continue;
    if (tensor.report.op == kDividedByCaller) continue;  // the next call's divisor is unknown
    const double length = seconds_per_element * static_cast<double>(tensor.report.numel);
    expected.push_back({tensor.ready - ended_.begin, length, tensor.report.priority,
                        tensor.report.chunks, waits_ ? tensor.done - ended_.begin : kNever});
    Report next = tensor.report;
    ++next.call;
    step.tensors.push_back(next);
  }
  if (expected.empty()) return step;
  double least_s = kNever;  // the least time of a chunk on the link
  for (const ExpectedTensor& tensor : expected) {
    least_s = std::min(least_s, tensor.length_s / tensor.chunks);
  }
  const auto hops = static_cast<double>(link_.hop_shares.size());
  link_.hop_s = std::max(0.0, chunk_s_ - least_s) / hops;
  const double steady_rate = *std::ranges::max_element(steady_rates_);
  link_.slowdown = steady_rate > 0.0 ? std::max(1.0, rate / steady_rate) : 1.0;
  const double link_s = rate > 0.0 ? chunk_bytes_ / rate : 0.0;
  const PredictedStep predicted = PredictStep(expected, policy_, link_, chunk_s_, link_s);
  // Before the link's rate is known, the window assumes no latency.
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
