#include "schedule/sim/sequence.h"

#include <algorithm>
#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "schedule/hash.h"
#include "schedule/leader.h"
#include "schedule/plan_window.h"
#include "schedule/step_order.h"

namespace thinwire::sim {
namespace {

double Bits(const CodecSpec& spec) {
  constexpr size_t kMany = size_t{1} << 20;
  return 8.0 * static_cast<double>(EncodedBytes(spec, kMany)) / kMany;
}

// So many bytes of fp32 that an announcement's latency idles no link.
size_t WindowBytes(const Setting& s, double latencies) {
  const CodecPair& codec = s.engine.codecs[0];
  const double rate = s.bytes_per_s * 64.0 / (Bits(codec.up) + Bits(codec.down));
  const double on_their_way = latencies * s.latency_s * rate;
  return s.engine.chunk_bytes * s.engine.lanes + static_cast<size_t>(on_their_way);
}

// Reports travel to rank 0, announcements back; all ranks have what is announced.
class LeaderSequence final : public Sequence {
 public:
  LeaderSequence(const Setting& setting, const Wire& wire, Events& events, Lanes& lanes)
      : setting_(setting),
        wire_(wire),
        events_(events),
        lanes_(lanes),
        leader_(setting.ranks, setting.engine.policy, WindowBytes(setting, 2)) {}

  void BeginStep(int, std::span<const double>) override {}

  void OnReady(int rank, uint32_t unit, int step) override {
    events_.After(rank == 0 ? 0.0 : setting_.latency_s, [this, rank, unit, step] {
      const Report report = ReportOf(unit, step);
      ids_[report.id()] = {unit, step};
      leader_.OnReport(rank, report).IgnoreError();
      Announce();
    });
  }

  void OnDone(const ChunkId& id) override {
    leader_.OnChunkDone(ReportOf(id.unit, id.step).id());
    Announce();
    StartAnnounced();
  }

 private:
  Report ReportOf(uint32_t unit, int step) const {
    Report report;
    report.key = HashCombine(unit + 1, 0);
    report.call = step;
    report.numel = wire_.numel(unit);
    report.priority = static_cast<int32_t>(unit);
    report.chunks = wire_.chunks(unit);
    return report;
  }

  void Announce() {
    for (const Announcement& next : leader_.Next()) {
      const auto [unit, step] = ids_.at(next.id);
      events_.After(setting_.latency_s, [this, id = ChunkId{unit, next.chunk, step}] {
        announced_.push_back(id);
        StartAnnounced();
      });
    }
  }

  void StartAnnounced() {
    while (!announced_.empty() && lanes_.Take()) {
      lanes_.Start(announced_.front());
      announced_.pop_front();
    }
  }

  const Setting& setting_;
  const Wire& wire_;
  Events& events_;
  Lanes& lanes_;
  Leader leader_;
  std::unordered_map<uint64_t, std::pair<uint32_t, int>> ids_;  // unit and step, of reports
  std::deque<ChunkId> announced_;                               // that have reached all ranks
};

// A planned chunk holds its lane until all ranks have it and the window lets it start.
class PlanSequence final : public Sequence {
 public:
  PlanSequence(const Setting& setting, const Wire& wire, Lanes& lanes)
      : setting_(setting), wire_(wire), lanes_(lanes) {
    window_.SetLimit(WindowBytes(setting, kPlanLatencies * setting.hop_latencies));
  }

  void BeginStep(int step, std::span<const double> ready_s) override {
    reports_.resize(step + 1);
    reports_.back().resize(wire_.units());
    const size_t units = wire_.units();
    std::vector<ExpectedTensor> tensors;  // submitted from the last to the first
    double foreseen = 0.0;
    for (size_t u = units; u-- > 0;) {
      if (wire_.raw(u)) continue;
      foreseen += setting_.profile.units[u].backward_s;
      tensors.push_back({ready_s.empty() ? foreseen : ready_s[u], wire_.link_s(u),
                         static_cast<int>(u), wire_.chunks(u)});
    }
    for (const ChunkOfStep& next : StepOrder(tensors, setting_.engine.policy)) {
      planned_.push_back({static_cast<uint32_t>(tensors[next.tensor].priority), next.chunk, step});
    }
  }

  void OnReady(int, uint32_t unit, int step) override {
    ++reports_[step][unit];
    StartPlanned();
  }

  void OnDone(const ChunkId& id) override {
    const auto found =
        std::find_if(held_.begin(), held_.end(), [&](const Held& held) { return held.id == id; });
    window_.Finish(found->place);
    held_.erase(found);
    StartPlanned();
  }

 private:
  enum class Phase { kWaiting, kReady, kStarted };
  struct Held {
    ChunkId id;
    uint64_t place;
    Phase phase = Phase::kWaiting;
  };

  void StartPlanned() {
    while (!planned_.empty() && lanes_.Take()) {
      window_.Hold(next_place_);
      held_.push_back({planned_.front(), next_place_++});
      planned_.pop_front();
    }
    for (Held& held : held_) {
      const bool all = reports_[held.id.step][held.id.unit] == setting_.ranks;
      if (held.phase == Phase::kWaiting && all) {
        window_.Ready(held.place, wire_.numel(held.id) * sizeof(float));
        held.phase = Phase::kReady;
      }
      if (held.phase == Phase::kReady && window_.MayStart(held.place)) {
        window_.Start(held.place);
        held.phase = Phase::kStarted;
        lanes_.Start(held.id);
      }
    }
  }

  const Setting& setting_;
  const Wire& wire_;
  Lanes& lanes_;
  std::deque<std::vector<int>> reports_;  // by step and unit
  std::deque<ChunkId> planned_;
  std::deque<Held> held_;  // in the order of the plan
  PlanWindow window_;
  uint64_t next_place_ = 0;
};

}  // namespace

std::unique_ptr<Sequence> MakeSequence(const Setting& setting, const Wire& wire, Events& events,
                                       Lanes& lanes) {
  if (setting.order == Order::kPlan) return std::make_unique<PlanSequence>(setting, wire, lanes);
  return std::make_unique<LeaderSequence>(setting, wire, events, lanes);
}

}  // namespace thinwire::sim
