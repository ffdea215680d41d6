#include "schedule/sim/sequence.h"

#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "schedule/hash.h"
#include "schedule/leader.h"
#include "schedule/step_order.h"

namespace thinwire::sim {
namespace {

double Bits(const CodecSpec& spec) {
  constexpr size_t kMany = size_t{1} << 20;
  return 8.0 * static_cast<double>(EncodedBytes(spec, kMany)) / kMany;
}

// So many bytes of fp32 that an announcement's latency idles no link.
size_t WindowBytes(const Setting& s) {
  const CodecPair& codec = s.engine.codecs[0];
  const double rate = s.bytes_per_s * 64.0 / (Bits(codec.up) + Bits(codec.down));
  return s.engine.chunk_bytes * s.engine.lanes + static_cast<size_t>(2 * s.latency_s * rate);
}

// Reports travel to rank 0, announcements back; all ranks have what is announced.
class LeaderSequence final : public Sequence {
 public:
  LeaderSequence(const Setting& setting, const Wire& wire, Events& events, Lanes& lanes)
      : setting_(setting),
        wire_(wire),
        events_(events),
        lanes_(lanes),
        leader_(setting.ranks, setting.engine.policy, WindowBytes(setting)) {}

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

// A planned chunk holds its lane until all ranks have it.
class PlanSequence final : public Sequence {
 public:
  PlanSequence(const Setting& setting, const Wire& wire, Lanes& lanes)
      : setting_(setting), wire_(wire), lanes_(lanes) {}

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

  void OnDone(const ChunkId&) override { StartPlanned(); }

 private:
  void StartPlanned() {
    while (!planned_.empty() && lanes_.Take()) {
      held_.push_back(planned_.front());
      planned_.pop_front();
    }
    for (auto it = held_.begin(); it != held_.end();) {
      if (reports_[it->step][it->unit] < setting_.ranks) {
        ++it;
        continue;
      }
      lanes_.Start(*it);
      it = held_.erase(it);
    }
  }

  const Setting& setting_;
  const Wire& wire_;
  Lanes& lanes_;
  std::deque<std::vector<int>> reports_;  // by step and unit
  std::deque<ChunkId> planned_, held_;
};

}  // namespace

std::unique_ptr<Sequence> MakeSequence(const Setting& setting, const Wire& wire, Events& events,
                                       Lanes& lanes) {
  if (setting.order == Order::kPlan) return std::make_unique<PlanSequence>(setting, wire, lanes);
  return std::make_unique<LeaderSequence>(setting, wire, events, lanes);
}

}  // namespace thinwire::sim
