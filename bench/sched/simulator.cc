#include "bench/sched/simulator.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <numeric>
#include <queue>
#include <random>
#include <unordered_map>

#include "bench/sched/jackson.h"
#include "schedule/hash.h"
#include "schedule/leader.h"
#include "schedule/plan.h"
#include "schedule/step_order.h"

namespace thinwire::sched {
namespace {

constexpr int kUncounted = 2;

// A chunk's life. The codec's work is half encoding, a quarter reducing, a quarter decoding.
enum class Phase { kEncode, kExchange, kReduce, kGather, kDecode, kDone };

class Simulation {
 public:
  explicit Simulation(const Setting& setting)
      : s_(setting),
        units_(setting.profile.units),
        random_(setting.seed),
        leader_(setting.ranks, setting.engine.policy, WindowBytes(setting)),
        ranks_(setting.ranks),
        free_lanes_(setting.engine.lanes) {
    for (const Unit& unit : units_) {
      const Segment segment{.name = "u", .offset = 0, .count = unit.numel, .total = unit.numel};
      plans_.push_back(MakePlan({&segment, 1}, s_.ranks, s_.engine));
      double bytes = 0;
      for (const Chunk& chunk : plans_.back().chunks) {
        bytes += HopBytes(s_.engine.codecs[0].up, chunk.numel());
        bytes += HopBytes(s_.engine.codecs[0].down, chunk.numel());
      }
      link_s_.push_back(bytes / s_.bytes_per_s);
    }
    ready_s_.resize(units_.size());
  }

  Outcome Run() {
    for (int r = 0; r < s_.ranks; ++r) BeginStep(r);
    while (!events_.empty() && outcome_.step_s.size() + kUncounted < size_t(s_.steps)) {
      const Event event = events_.top();
      events_.pop();
      now_ = event.at;
      Handle(event);
    }
    outcome_.finished = outcome_.step_s.size() + kUncounted == size_t(s_.steps);
    return outcome_;
  }

 private:
  enum class Kind { kComputed, kReport, kAnnounced, kPhase };
  struct Event {
    double at;
    uint64_t number;  // first scheduled, first handled
    Kind kind;
    int rank = 0;
    uint64_t what = 0;  // unit or flight
    int step = 0;
    bool operator>(const Event& other) const {
      return std::tie(at, number) > std::tie(other.at, other.number);
    }
  };
  struct Rank {
    int step = -1;
    bool forward = false;
    size_t unit = 0;  // being computed, or waited for
    bool waiting = false;
    double began = 0, backward_end = 0;
    std::vector<double> forward_s;  // of this step
  };
  // A step of all ranks, until the last of them has ended it.
  struct Step {
    std::vector<int> reports;       // by unit
    std::vector<double> ready_sum;  // since each rank's begin
    std::vector<double> ready_max;
    std::vector<size_t> chunks_left;
    size_t units_left = 0;
    int ended = 0;
    double bound_end = 0, end = 0;
  };
  struct Flight {
    uint32_t unit, chunk;
    int step;
    Phase phase;
  };

  static size_t WindowBytes(const Setting& s) {
    const double rate =
        s.bytes_per_s * 64.0 / (Bits(s.engine.codecs[0].up) + Bits(s.engine.codecs[0].down));
    return s.engine.chunk_bytes * s.engine.lanes + static_cast<size_t>(2 * s.latency_s * rate);
  }
  static double Bits(const CodecSpec& spec) {
    constexpr size_t kMany = size_t{1} << 20;
    return 8.0 * EncodedBytes(spec, kMany) / kMany;
  }
  double HopBytes(const CodecSpec& spec, size_t numel) const {
    return static_cast<double>(EncodedBytes(spec, numel)) * (s_.ranks - 1) / s_.ranks;
  }

  void At(double when, Kind kind, int rank, uint64_t what, int step = 0) {
    events_.push({when, ++scheduled_, kind, rank, what, step});
  }

  // Seconds of a layer on a rank.
  double Jittered(double seconds, int rank) {
    const double slow = rank == 1 ? 1.0 + s_.straggling : 1.0;
    return seconds * slow * (1.0 + 2.0 * s_.jitter * uniform_(random_));
  }

  // Ranks.

  void BeginStep(int r) {
    Rank& rank = ranks_[r];
    ++rank.step;
    rank.forward = false;
    rank.unit = units_.size();
    rank.began = now_;
    rank.forward_s.resize(units_.size());
    for (size_t u = 0; u < units_.size(); ++u) rank.forward_s[u] = Jittered(units_[u].forward_s, r);
    if (steps_.size() <= size_t(rank.step)) {
      Step step;
      step.reports.resize(units_.size());
      step.ready_sum.resize(units_.size());
      step.ready_max.resize(units_.size());
      for (const Plan& plan : plans_) step.chunks_left.push_back(plan.chunks.size());
      step.units_left = units_.size();
      steps_.push_back(std::move(step));
      Foretell();
    }
    NextBackward(r);
  }

  void NextBackward(int r) {
    Rank& rank = ranks_[r];
    if (rank.unit == 0) {
      rank.forward = true;
      rank.backward_end = now_;
      return NextForward(r);
    }
    --rank.unit;
    At(now_ + Jittered(units_[rank.unit].backward_s, r), Kind::kComputed, r, 0);
  }

  void NextForward(int r) {
    Rank& rank = ranks_[r];
    if (rank.unit == units_.size()) return EndStep(r);
    const Step& step = steps_[rank.step];
    rank.waiting = s_.barrier ? step.units_left > 0 : step.chunks_left[rank.unit] > 0;
    if (s_.ranks == 1) rank.waiting = false;
    if (rank.waiting) return;
    At(now_ + rank.forward_s[rank.unit], Kind::kComputed, r, 0);
  }

  void OnComputed(int r) {
    Rank& rank = ranks_[r];
    if (rank.forward) {
      ++rank.unit;
      return NextForward(r);
    }
    Step& step = steps_[rank.step];
    step.ready_sum[rank.unit] += now_ - rank.began;
    step.ready_max[rank.unit] = std::max(step.ready_max[rank.unit], now_);
    if (s_.ranks > 1) At(now_ + Latency(r), Kind::kReport, r, rank.unit, rank.step);
    NextBackward(r);
  }

  double Latency(int r) const { return r == 0 || s_.order == Order::kPlan ? 0.0 : s_.latency_s; }

  void EndStep(int r) {
    Rank& rank = ranks_[r];
    Step& step = steps_[rank.step];
    step.bound_end = std::max(step.bound_end, BoundOf(rank, step));
    step.end = now_;
    if (++step.ended == s_.ranks) {
      const double before = rank.step == 0 ? 0.0 : steps_[rank.step - 1].end;
      if (rank.step >= kUncounted) {
        outcome_.step_s.push_back(step.end - before);
        outcome_.bound_s.push_back(step.bound_end - before);
      }
    }
    BeginStep(r);
  }

  // When this rank could have ended the step at best, given what it and the others computed. The
  // last hop's latency follows the last byte; the first hop's may be hidden by other chunks' bytes,
  // but not from a unit's first chunk.
  double BoundOf(const Rank& rank, const Step& step) const {
    double tail = std::accumulate(rank.forward_s.begin(), rank.forward_s.end(), 0.0);
    double best = rank.backward_end + tail;
    if (s_.ranks == 1) return best;
    std::vector<Job> jobs;
    for (size_t u = 0; u < units_.size(); ++u) {
      const double chunk = link_s_[u] / plans_[u].chunks.size();
      best = std::max(best, step.ready_max[u] + chunk + 2 * s_.latency_s + tail);
      jobs.push_back({step.ready_max[u], link_s_[u], tail + s_.latency_s});
      tail -= rank.forward_s[u];
    }
    return std::max(best, JacksonBound(jobs));
  }

  // Order.

  Report ReportOf(size_t unit, int step) const {
    Report report;
    report.key = HashCombine(unit + 1, 0);
    report.call = step;
    report.numel = units_[unit].numel;
    report.priority = static_cast<int32_t>(unit);
    report.chunks = static_cast<uint32_t>(plans_[unit].chunks.size());
    return report;
  }

  void OnReport(const Event& event) {
    ++steps_[event.step].reports[event.what];
    if (s_.order == Order::kPlan) return StartFlights();
    const Report report = ReportOf(event.what, event.step);
    ids_[report.id()] = {static_cast<uint32_t>(event.what), event.step};
    leader_.OnReport(event.rank, report).IgnoreError();
    Announce();
  }

  void Announce() {
    for (const Announcement& announcement : leader_.Next()) {
      const auto [unit, step] = ids_.at(announcement.id);
      announced_.push_back({unit, announcement.chunk, step, Phase::kEncode});
      At(now_ + s_.latency_s, Kind::kAnnounced, 0, 0);
    }
  }

  // Of a step that begins: from the step before it, once there was one.
  void Foretell() {
    if (s_.order != Order::kPlan) return;
    const int step = static_cast<int>(steps_.size()) - 1;
    if (step > 0) {
      for (size_t u = 0; u < units_.size(); ++u) {
        ready_s_[u] = steps_[step - 1].ready_sum[u] / s_.ranks;
      }
    } else {
      double at = 0;
      for (size_t u = units_.size(); u-- > 0;) ready_s_[u] = at += units_[u].backward_s;
    }
    std::vector<ExpectedTensor> tensors;  // submitted from the last to the first
    for (size_t u = units_.size(); u-- > 0;) {
      tensors.push_back({ready_s_[u], link_s_[u], static_cast<int>(u),
                         static_cast<uint32_t>(plans_[u].chunks.size())});
    }
    for (const ChunkOfStep& next : StepOrder(tensors, s_.engine.policy)) {
      const auto unit = static_cast<uint32_t>(units_.size() - 1 - next.tensor);
      planned_.push_back({unit, next.chunk, step, Phase::kEncode});
    }
  }

  // Lanes.

  // A planned chunk holds its lane until all ranks have it; an announced one they all have.
  void StartFlights() {
    while (s_.order == Order::kPlan && free_lanes_ > 0 && !planned_.empty()) {
      --free_lanes_;
      held_.push_back(planned_.front());
      planned_.pop_front();
    }
    for (auto it = held_.begin(); it != held_.end();) {
      if (steps_[it->step].reports[it->unit] < s_.ranks) {
        ++it;
        continue;
      }
      Start(*it);
      it = held_.erase(it);
    }
    while (s_.order == Order::kLeader && free_lanes_ > 0 && arrived_ > 0) {
      --free_lanes_;
      --arrived_;
      Start(announced_.front());
      announced_.pop_front();
    }
  }

  void Start(const Flight& flight) {
    flights_.emplace(++flown_, flight);
    At(now_ + 0.5 * CodecSeconds(flight), Kind::kPhase, 0, flown_);
  }
  double CodecSeconds(const Flight& flight) const {
    return s_.codec_s_per_element * plans_[flight.unit].chunks[flight.chunk].numel();
  }

  // The phase of a flight has ended.
  void OnPhase(uint64_t id) {
    Flight& flight = flights_.at(id);
    const size_t numel = plans_[flight.unit].chunks[flight.chunk].numel();
    const CodecPair& codec = s_.engine.codecs[0];
    switch (flight.phase) {
      case Phase::kEncode:
        flight.phase = Phase::kExchange;
        return Send(id, HopBytes(codec.up, numel));
      case Phase::kExchange:
        flight.phase = Phase::kReduce;
        return At(now_ + 0.25 * CodecSeconds(flight), Kind::kPhase, 0, id);
      case Phase::kReduce:
        flight.phase = Phase::kGather;
        return Send(id, HopBytes(codec.down, numel));
      case Phase::kGather:
        flight.phase = Phase::kDecode;
        return At(now_ + 0.25 * CodecSeconds(flight), Kind::kPhase, 0, id);
      default: return Finish(id);
    }
  }

  void Finish(uint64_t id) {
    const Flight flight = flights_.at(id);
    flights_.erase(id);
    ++free_lanes_;
    Step& step = steps_[flight.step];
    if (s_.order == Order::kLeader) {
      leader_.OnChunkDone(ReportOf(flight.unit, flight.step).id());
      Announce();
    }
    if (--step.chunks_left[flight.unit] == 0) {
      --step.units_left;
      for (int r = 0; r < s_.ranks; ++r) {
        if (ranks_[r].waiting && ranks_[r].step == flight.step) NextForward(r);
      }
    }
    StartFlights();
  }

  // The link: one message after the other, as they were handed to it. (Gloo has one connection for
  // each pair of ranks.)
  void Send(uint64_t id, double bytes) {
    link_free_at_ = std::max(link_free_at_, now_) + bytes / s_.bytes_per_s;
    At(link_free_at_ + s_.latency_s + s_.overhead_s, Kind::kPhase, 0, id);
  }

  void Handle(const Event& event) {
    switch (event.kind) {
      case Kind::kComputed: return OnComputed(event.rank);
      case Kind::kReport: return OnReport(event);
      case Kind::kAnnounced: ++arrived_; return StartFlights();
      case Kind::kPhase: return OnPhase(event.what);
    }
  }

  const Setting& s_;
  const std::vector<Unit>& units_;
  std::mt19937_64 random_;
  std::uniform_real_distribution<double> uniform_{0.0, 1.0};
  Leader leader_;
  std::vector<Plan> plans_;     // by unit
  std::vector<double> link_s_;  // likewise: what its bytes take, on both hops
  std::vector<Rank> ranks_;
  std::deque<Step> steps_;
  std::vector<double> ready_s_;
  std::unordered_map<uint64_t, std::pair<uint32_t, int>> ids_;  // unit and step, of reports

  int free_lanes_;
  std::deque<Flight> announced_, planned_, held_;
  size_t arrived_ = 0;  // announcements that have reached all ranks
  std::unordered_map<uint64_t, Flight> flights_;
  uint64_t flown_ = 0;
  double link_free_at_ = 0;

  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  uint64_t scheduled_ = 0;
  double now_ = 0;
  Outcome outcome_;
};

}  // namespace

double Outcome::ratio() const {
  return std::accumulate(step_s.begin(), step_s.end(), 0.0) /
         std::accumulate(bound_s.begin(), bound_s.end(), 0.0);
}

double Outcome::mean_s() const {
  return std::accumulate(step_s.begin(), step_s.end(), 0.0) / step_s.size();
}

Outcome Simulate(const Setting& setting) { return Simulation(setting).Run(); }

}  // namespace thinwire::sched
