// Host: replaces the engines, the control channel and the exchanges around the sequencers of all
// ranks, on a virtual clock. A test picks the next event from those that can happen.
#ifndef THINWIRE_TESTS_SCHEDULE_SEQUENCER_HOST_H_
#define THINWIRE_TESTS_SCHEDULE_SEQUENCER_HOST_H_

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "schedule/order/sequencer.h"

namespace thinwire {

using ChunkId = std::pair<uint64_t, uint32_t>;

inline Report Of(uint64_t key, uint64_t call, uint32_t chunks = 1, uint64_t numel = 1024) {
  Report report;
  report.key = key;
  report.call = call;
  report.chunks = chunks;
  report.numel = numel;
  report.partition_hash = key * 1000 + chunks;
  report.priority = static_cast<int32_t>(key % 3);
  SetName("t" + std::to_string(key), {}, &report);
  return report;
}

class Host {
 public:
  Host(int world, const Options& options, Matching matching)
      : options_(options), matching_(matching) {
    for (int r = 0; r < world; ++r) {
      ranks_.push_back(std::make_unique<Rank>(Membership{r, world}, options, matching));
    }
    ranks_[0]->sequencer.Begin(now_);
    CarryOut(0);
  }

  int world() const { return static_cast<int>(ranks_.size()); }
  void Advance(double seconds) { now_ += seconds; }

  void Submit(int rank, const Report& report) {
    ranks_[rank]->chunks_left[report.id()] = report.chunks;
    ranks_[rank]->sequencer.OnSubmit(std::make_shared<const Report>(report), now_);
    CarryOut(rank);
  }
  void EndStep(int rank) {
    ranks_[rank]->sequencer.EndStep(now_);
    CarryOut(rank);
  }
  void ForgetStep(int rank) {
    ranks_[rank]->sequencer.ForgetStep(now_);
    CarryOut(rank);
  }
  void DirectDone(int rank, uint64_t id) {
    ranks_[rank]->chunks_left.erase(id);
    ranks_[rank]->sequencer.OnDirectDone(id);
    CarryOut(rank);
  }
  void Clock() {
    for (int r = 0; r < world(); ++r) {
      ranks_[r]->sequencer.OnClock(now_);
      CarryOut(r);
    }
  }

  // Pairs of ranks (from, to) with a message on its way.
  std::vector<std::pair<int, int>> Deliverable() const {
    std::vector<std::pair<int, int>> pairs;
    for (const auto& [pair, queue] : wires_) {
      if (!queue.empty() && pair.first != silent_) pairs.push_back(pair);
    }
    return pairs;
  }
  void Deliver(std::pair<int, int> pair) {
    const OrderMessage message = wires_[pair].front();
    wires_[pair].pop_front();
    NoteWithdrawn(pair.second, message);
    ranks_[pair.second]->sequencer.OnMessage(pair.first, message, now_);
    CarryOut(pair.second);
  }

  // Chunks that may end on a rank: all ranks have started them, and with Matching::kByOrder each is
  // a drain or has a successor on every rank.
  std::vector<std::pair<int, ChunkId>> Endable() const {
    std::vector<std::pair<int, ChunkId>> endable;
    for (int r = 0; r < world() && !cut_; ++r) {
      for (const auto& [chunk, start] : ranks_[r]->running) {
        bool everywhere = true;
        for (const auto& rank : ranks_) everywhere = everywhere && rank->Passes(chunk, matching_);
        if (everywhere) endable.push_back({r, chunk});
      }
    }
    return endable;
  }
  void End(int rank, ChunkId chunk) {
    Rank& r = *ranks_[rank];
    const StartChunk start = r.running.at(chunk);
    r.running.erase(chunk);
    const bool last = --r.chunks_left.at(chunk.first) == 0;
    if (last) r.chunks_left.erase(chunk.first);
    for (int hop = 0; hop < 2 && start.predicted; ++hop) r.sequencer.OnHopDone(start, now_);
    r.sequencer.OnChunkDone(start, last, now_);
    CarryOut(rank);
  }

  bool InFlight(int rank, uint64_t id) const { return ranks_[rank]->chunks_left.contains(id); }
  bool IsIdle(int rank) const { return ranks_[rank]->chunks_left.empty(); }
  const std::vector<ChunkId>& Order(int rank) const { return ranks_[rank]->order; }
  size_t predicted() const { return predicted_; }
  std::string Describe(int rank) const { return ranks_[rank]->sequencer.Describe(); }
  // The first failure of a rank.
  const absl::Status& failure(int rank) const { return ranks_[rank]->failure; }
  // The number of ranks that will not echo it.
  int silent(int rank) const { return ranks_[rank]->silent; }
  // Drops all later messages of this rank.
  void Silence(int rank) { silent_ = rank; }
  // No exchange ends after this.
  void CutExchanges() { cut_ = true; }

 private:
  struct Rank {
    Rank(Membership members, const Options& options, Matching matching)
        : sequencer(members, options, matching, {0.5, 0.5}) {}

    bool Passes(ChunkId chunk, Matching matching) const {
      const auto found = at.find(chunk);
      if (found == at.end()) return false;
      return matching == Matching::kByTag || drains[found->second] ||
             found->second + 1 < order.size();
    }

    Sequencer sequencer;
    std::map<uint64_t, uint32_t> chunks_left;  // of tensors submitted and not done
    std::vector<ChunkId> order;                // in the order of their starts
    std::vector<bool> drains;
    std::map<ChunkId, size_t> at;  // position in `order`
    std::map<ChunkId, StartChunk> running;
    std::set<uint64_t> withdrawn;  // tensor ids
    absl::Status failure;
    int silent = 0;
  };

  void NoteWithdrawn(int rank, const OrderMessage& message) {
    for (const Withdrawal& each : message.withdrawn) ranks_[rank]->withdrawn.insert(each.id);
  }

  void CarryOut(int rank) {
    Outbox outbox;
    std::swap(outbox, ranks_[rank]->sequencer.outbox());
    for (const Action& action : outbox.actions()) {
      if (action.kind == Action::Kind::kStart) Start(rank, action.start);
      if (action.kind == Action::Kind::kFail && ranks_[rank]->failure.ok()) {
        ranks_[rank]->failure = action.reason;
        ranks_[rank]->silent = action.silent;
      }
      const bool sends = action.kind == Action::Kind::kSend;
      if (sends) NoteWithdrawn(rank, action.message);
      for (int to = 0; sends && to < world(); ++to) {
        if (to == rank || (action.to != kEveryone && action.to != to)) continue;
        wires_[{rank, to}].push_back(action.message);
      }
    }
  }

  void Start(int rank, const StartChunk& start) {
    Rank& r = *ranks_[rank];
    const ChunkId chunk{start.id, start.chunk};
    EXPECT_TRUE(r.chunks_left.contains(start.id)) << "not submitted";
    EXPECT_TRUE(r.at.emplace(chunk, r.order.size()).second) << "started twice";
    r.order.push_back(chunk);
    r.drains.push_back(start.drain);
    r.running[chunk] = start;
    predicted_ += start.predicted ? 1 : 0;
    int ordered = 0, ahead = 0;
    for (const auto& [id, running] : r.running) {
      if (!r.withdrawn.contains(id.first)) ++(running.position == 0 ? ordered : ahead);
    }
    EXPECT_LE(ordered, options_.lanes);
    EXPECT_LE(ahead, options_.predicted_lanes);
  }

  const Options options_;
  const Matching matching_;
  double now_ = 0.0;
  int silent_ = -1;
  bool cut_ = false;
  size_t predicted_ = 0;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::map<std::pair<int, int>, std::deque<OrderMessage>> wires_;
};

// Runs one possible event; returns false if there is none. `more`: the possible submissions.
inline bool RunOne(Host& host, std::mt19937_64& random, std::vector<std::function<void()>> more) {
  for (const auto& pair : host.Deliverable()) more.push_back([&host, pair] { host.Deliver(pair); });
  for (const auto& [rank, chunk] : host.Endable()) {
    more.push_back([&host, rank = rank, chunk = chunk] { host.End(rank, chunk); });
  }
  if (more.empty()) return false;
  host.Advance(1e-4);
  more[random() % more.size()]();
  return true;
}

inline void Settle(Host& host) {
  std::mt19937_64 random(0);
  while (RunOne(host, random, {})) {
  }
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_SCHEDULE_SEQUENCER_HOST_H_
