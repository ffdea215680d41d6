#include "schedule/sim/simulator.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <numeric>
#include <random>

#include "schedule/sim/events.h"
#include "schedule/sim/jackson.h"
#include "schedule/sim/lanes.h"
#include "schedule/sim/processor.h"
#include "schedule/sim/sequencers.h"
#include "schedule/sim/wire.h"

namespace thinwire::sim {
namespace {

// The ranks and their steps.
class Simulation {
 public:
  explicit Simulation(const Setting& setting)
      : s_(setting),
        units_(setting.profile.units),
        wire_(setting),
        processor_(setting.contention),
        lanes_(
            setting, wire_, events_, processor_,
            [this](const ChunkId& id) { sequencers_.OnHopDone(id); },
            [this](const ChunkId& id) { OnDone(id); }),
        sequencers_(setting, wire_, events_, lanes_),
        random_(setting.seed),
        ranks_(setting.ranks) {}

  Outcome Run() {
    sequencers_.Begin();
    for (int r = 0; r < s_.ranks; ++r) BeginStep(r);
    const size_t wanted = std::max(0, s_.steps - s_.warmup);
    while (outcome_.step_s.size() < wanted && sequencers_.status().ok() && events_.Next()) {
    }
    outcome_.finished = outcome_.step_s.size() == wanted;
    outcome_.control_frames = sequencers_.control_frames() / std::max(1, s_.steps);
    return std::move(outcome_);
  }

 private:
  struct Rank {
    int step = -1;
    size_t unit = 0;  // that it computes, or waits for
    bool waiting = false;
    double backward_end = 0;
    std::vector<double> forward_s;  // of this step
  };
  // A step of all ranks.
  struct Step {
    std::vector<int> ready;         // number of ranks, by unit
    std::vector<double> ready_max;  // when all ranks had the unit
    std::vector<size_t> chunks_left;
    size_t units_left = 0;
    int ended = 0;
    double bound_end = 0, end = 0;
  };

  // Seconds of a layer on a rank.
  double Jittered(double seconds, int rank) {
    const double slow = rank == 1 ? 1.0 + s_.straggling : 1.0;
    return seconds * slow * (1.0 + 2.0 * s_.jitter * uniform_(random_));
  }

  // Calls `then` after `seconds` plus the time that codecs and sending take meanwhile.
  void Compute(double seconds, Events::Action then) {
    if (s_.contention == 0.0) return events_.After(seconds, std::move(then));
    processor_.Computing(+1);
    Continue(seconds, std::move(then));
  }
  void Continue(double seconds, Events::Action then) {
    events_.After(seconds, [this, then = std::move(then), before = processor_.taken()] {
      const double lost = processor_.taken() - before;
      if (lost > 0.0) return Continue(lost, then);
      processor_.Computing(-1);
      then();
    });
  }

  void BeginStep(int r) {
    Rank& rank = ranks_[r];
    ++rank.step;
    rank.unit = units_.size();
    rank.forward_s.resize(units_.size());
    for (size_t u = 0; u < units_.size(); ++u) rank.forward_s[u] = Jittered(units_[u].forward_s, r);
    if (steps_.size() <= size_t(rank.step)) AddStep();
    NextBackward(r);
  }

  void AddStep() {
    Step step;
    step.ready.resize(units_.size());
    step.ready_max.resize(units_.size());
    for (size_t u = 0; u < units_.size(); ++u) step.chunks_left.push_back(wire_.chunks(u));
    step.units_left = units_.size();
    steps_.push_back(std::move(step));
  }

  void NextBackward(int r) {
    Rank& rank = ranks_[r];
    if (rank.unit == 0) {
      rank.backward_end = events_.now();
      if (s_.ranks > 1) sequencers_.EndStep(r);
      return Compute(s_.profile.between_s, [this, r] { NextForward(r); });
    }
    --rank.unit;
    Compute(Jittered(units_[rank.unit].backward_s, r), [this, r] {
      OnReady(r);
      NextBackward(r);
    });
  }

  void OnReady(int r) {
    if (s_.ranks == 1) return;
    const auto unit = static_cast<uint32_t>(ranks_[r].unit);
    const int number = ranks_[r].step;
    Step& step = steps_[number];
    step.ready_max[unit] = std::max(step.ready_max[unit], events_.now());
    const bool all = ++step.ready[unit] == s_.ranks;
    if (!wire_.direct(unit)) return sequencers_.OnReady(r, unit, number);
    if (all) lanes_.StartDirect({unit, 0, number});
  }

  void NextForward(int r) {
    Rank& rank = ranks_[r];
    if (rank.unit == units_.size()) return EndStep(r);
    const Step& step = steps_[rank.step];
    rank.waiting = s_.barrier ? step.units_left > 0 : step.chunks_left[rank.unit] > 0;
    if (s_.ranks == 1) rank.waiting = false;
    if (rank.waiting) return;
    Compute(rank.forward_s[rank.unit], [this, r] {
      ++ranks_[r].unit;
      NextForward(r);
    });
  }

  void OnDone(const ChunkId& id) {
    Step& step = steps_[id.step];
    if (!wire_.direct(id.unit)) sequencers_.OnDone(id);
    if (--step.chunks_left[id.unit] > 0) return;
    --step.units_left;
    for (int r = 0; r < s_.ranks; ++r) {
      if (ranks_[r].waiting && ranks_[r].step == id.step) NextForward(r);
    }
  }

  void EndStep(int r) {
    Rank& rank = ranks_[r];
    Step& step = steps_[rank.step];
    step.bound_end = std::max(step.bound_end, BoundOf(rank, step));
    step.end = events_.now();
    if (++step.ended == s_.ranks && rank.step >= s_.warmup) {
      const double before = steps_[rank.step - 1].end;
      outcome_.step_s.push_back(step.end - before);
      outcome_.bound_s.push_back(step.bound_end - before);
    }
    BeginStep(r);
  }

  // The earliest time at which this rank could have ended the step, given what it and the others
  // computed. The last hop's latency follows the last byte; the first hop's may be hidden behind
  // other chunks' bytes, except for a unit's first chunk.
  double BoundOf(const Rank& rank, const Step& step) const {
    double tail = std::accumulate(rank.forward_s.begin(), rank.forward_s.end(), 0.0);
    double best = rank.backward_end + s_.profile.between_s + tail;
    if (s_.ranks == 1) return best;
    const double hop_s = s_.hop_latencies * s_.latency_s;
    std::vector<Job> jobs;
    for (size_t u = 0; u < units_.size(); ++u) {
      const double chunk = wire_.link_s(u) / wire_.chunks(u);
      const int hops = wire_.hops(u);
      best = std::max(best, step.ready_max[u] + chunk + hops * hop_s + tail);
      jobs.push_back({step.ready_max[u], wire_.link_s(u), tail + hop_s});
      tail -= rank.forward_s[u];
    }
    return std::max(best, JacksonBound(jobs));
  }

  const Setting& s_;
  const std::vector<Unit>& units_;
  const Wire wire_;
  Events events_;
  Processor processor_;
  Lanes lanes_;
  Sequencers sequencers_;
  std::mt19937_64 random_;
  std::uniform_real_distribution<double> uniform_{0.0, 1.0};
  std::vector<Rank> ranks_;
  std::deque<Step> steps_;
  Outcome outcome_;
};

}  // namespace

// The 4 was measured with sched_bench.
int LanesFor(const Setting& setting) {
  Setting one = setting;
  one.profile.units = {{setting.engine.chunk_bytes / sizeof(float), 0.0, 0.0}};
  const Wire wire(one);
  const double latencies = setting.hop_latencies * wire.hops(0);
  const double on_their_way = latencies * setting.latency_s / wire.link_s(0);
  return 4 + static_cast<int>(std::ceil(on_their_way));
}

double Outcome::ratio() const {
  return std::accumulate(step_s.begin(), step_s.end(), 0.0) /
         std::accumulate(bound_s.begin(), bound_s.end(), 0.0);
}

double Outcome::mean_s() const {
  return std::accumulate(step_s.begin(), step_s.end(), 0.0) / static_cast<double>(step_s.size());
}

Outcome Simulate(const Setting& setting) { return Simulation(setting).Run(); }

}  // namespace thinwire::sim
