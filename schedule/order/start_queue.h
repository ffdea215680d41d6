// StartQueue: the chunks that rank 0 has ordered, until they start on this rank and are done.
//
// Announced chunks start in the announced order, as many at a time as there are lanes, and with
// Matching::kByOrder predicted ones stand among them. With kByTag each predicted chunk starts when
// this rank has submitted it and a window allows it. An ordered chunk that does not match this
// rank's tensor fails the group. Starts and failures go into the outbox. Not thread-safe.
//
// A predicted chunk takes a lane before it is ready, and its hops share the link with those of all
// other chunks. If all lanes sent at once, an urgent chunk would wait behind their bytes; so a
// window limits the bytes under way to what keeps the link busy. A chunk counts with the bytes of
// the hop that it is at. If it counted with all its bytes from start to end, the window would have
// to be as large as what the link carries during all hops' latencies; a step's first chunks would
// fill it at once, and their later hops would then go ahead of urgent chunks. All ranks agree on
// the order of chunks but not on when each is ready, so a window alone could hold back a chunk that
// a peer waits for. So the oldest unfinished chunk starts in any case, and finishes on all ranks.
//
// A chunk that overtakes one that this rank has not submitted yet may fill only half of the window.
// With all of it, chunks that are ready but not urgent would fill the window during a backward pass
// and then hold back urgent ones; with none of it, the link would be idle behind a late tensor.
//
// Rank 0 withdraws a predicted tensor that its step lacks, whose chunks would otherwise be held for
// ever. In a standstill it also withdraws tensors that all ranks have, since a rank may wait for
// one of them before it submits a tensor that is ordered earlier. All ranks get the withdrawal at
// the same place among the orders. A rank that is a step ahead may have started chunks of the
// withdrawn tensor. These go on: they are the same exchanges that rank 0 announces once all ranks
// have the tensor, so this rank skips their announcements, and the others start them. Until then
// they wait for peers, which may wait for the predicted order. So they no longer count in it:
// neither for lanes nor as the oldest chunk.
#ifndef THINWIRE_SCHEDULE_ORDER_START_QUEUE_H_
#define THINWIRE_SCHEDULE_ORDER_START_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "schedule/containers.h"
#include "schedule/options.h"
#include "schedule/order/frames.h"
#include "transport/planes.h"

namespace thinwire {

// A tensor that a rank has submitted and not finished. Small: the simulator has thousands of ranks.
struct OwnTensor {
  std::shared_ptr<const Report> report;  // null: there is no such tensor
  uint32_t started = 0;                  // chunks
  bool reported = false;
  bool overdue = false;
  std::shared_ptr<void> host = nullptr;  // for StartChunk::host
  double submitted = 0.0;                // seconds of the sequencer's clock
  double overdue_since = 0.0;
};

// The tensors of one rank or, in the simulator, of all of them, by id. All ranks' entries of a
// tensor lie side by side, since the same event of a tensor occurs on all ranks within a short
// time: with a map per rank, each access would miss the cache. Not thread-safe.
class TensorBook {
 public:
  // Holds the tensors of ranks [first, first + ranks).
  TensorBook(int first, int ranks) : first_(first), ranks_(ranks) {}

  // Null if the rank has no tensor with this id.
  OwnTensor* Find(int rank, uint64_t id) {
    Row* const row = rows_.Find(id);
    if (row == nullptr) return nullptr;
    OwnTensor& own = row->of[rank - first_];
    return own.report == nullptr ? nullptr : &own;
  }

  // Replaces the rank's tensor under the id, if there is one. tensor.report must not be null.
  void Insert(int rank, uint64_t id, OwnTensor tensor) {
    Row& row = rows_.Insert(id);
    row.of.resize(ranks_);
    OwnTensor& own = row.of[rank - first_];
    if (own.report == nullptr) ++row.taken;
    own = std::move(tensor);
  }

  void Erase(int rank, uint64_t id) {
    Row* const row = rows_.Find(id);
    if (row == nullptr || row->of[rank - first_].report == nullptr) return;
    row->of[rank - first_] = OwnTensor();
    if (--row->taken == 0) rows_.Erase(id);
  }

  // Calls visit(tensor) for each tensor of the rank, in no order.
  template <typename Visit>
  void ForEach(int rank, Visit visit) {
    rows_.ForEach([&](uint64_t, Row& row) {
      if (row.of[rank - first_].report != nullptr) visit(row.of[rank - first_]);
    });
  }

 private:
  struct Row {
    std::vector<OwnTensor> of;  // by rank
    int taken = 0;
  };

  const int first_, ranks_;
  RecycledMap<Row> rows_;  // by id; the values of a spare row are all empty
};

class StartQueue {
 public:
  // The number of predicted chunks that hold a lane before they start. With a larger number, ranks
  // on which different chunks are ready would start more chunks that their peers do not have yet.
  static constexpr size_t kAhead = 4;

  // `hop_shares`: each hop's share of a chunk's bytes; 0 for hops inside nodes, where a chunk
  // counts with the next hop between nodes. A chunk counts until OnDone at most, whatever the hops
  // of its own algorithm, and even if OnHopDone is not called. `book` and `outbox` must outlive the
  // queue, which counts the started chunks of the rank's tensors in `book`.
  StartQueue(int rank, const Options& options, Matching matching, std::vector<double> hop_shares,
             TensorBook& book, Outbox& outbox);

  void Append(const std::vector<Announcement>& announcements);
  void Append(const std::vector<PredictedChunk>& chunks);
  // The chunks of these tensors are no longer predicted. Only with Matching::kByTag: if all chunks
  // start in one order, chunks that have started would have another place in it.
  void Withdraw(const std::vector<Withdrawal>& withdrawn);
  // Starts all chunks that may start now.
  void Start(double now);
  void OnHopDone(const StartChunk& chunk);
  void OnDone(const StartChunk& chunk);

  // Human-readable: who waits for what.
  std::string Describe() const;

 private:
  struct Ordered {
    uint64_t id = 0;              // of the chunk's tensor
    uint64_t partition_hash = 0;  // of a predicted chunk
    uint32_t chunk = 0;
    bool drain = true;
    bool predicted = false;
  };
  enum class Phase { kPredicted, kReady, kStarted };
  struct Held {
    PredictedChunk chunk;
    uint64_t position;  // in the predicted order, from 1
    Phase phase = Phase::kPredicted;
    size_t bytes = 0;  // of fp32 input; 0 before it is ready
    size_t hop = 0;    // from 0
    bool withdrawn = false;
  };

  // The chunk starts if the hops under way then, including its own first hop, have at most this
  // many bytes of fp32 input, or if it is the oldest or the only chunk.
  static size_t Window(const PredictedChunk& chunk) { return size_t{chunk.window_kib} << 10; }

  void StartOrdered(double now);
  void StartPredicted(double now);
  Held* NextPredicted();
  void HoldMore();
  std::deque<Held>::iterator Find(uint64_t position);
  // Bytes of the hop that the chunk is at; 0 after the last hop.
  size_t HopBytes(const Held& held) const {
    const double share = held.hop < hop_shares_.size() ? hop_shares_[held.hop] : 0.0;
    return static_cast<size_t>(share * static_cast<double>(held.bytes));
  }
  size_t AtOnce() const;
  bool AsPredicted(const Report& report, uint64_t partition_hash);
  bool IsLeft(uint32_t chunk, OwnTensor* own);
  bool HasStarted(const Announcement& announcement);
  void Fail(absl::Status reason) { outbox_.Fail(std::move(reason), 0); }

  const int rank_, lanes_;
  const size_t predicted_lanes_;
  const size_t chunk_bytes_;
  const Matching matching_;
  std::vector<double> hop_shares_;  // for hops inside nodes: the next hop's
  size_t hops_ = 0;                 // number of hops between nodes
  TensorBook& book_;
  Outbox& outbox_;

  RingQueue<Ordered> ordered_;  // announced, and with kByOrder predicted, not started
  int running_ = 0;             // started from ordered_ and not done
  // By id of a withdrawn tensor: its chunks below this number had started, and are not announced
  // yet. The tensor may be done here when its announcement comes.
  RecycledMap<uint32_t> started_ahead_;

  // With kByTag: predicted chunks, from the prediction until they are done. Chunks under way hold a
  // lane, and so do the first few others; the window decides which of these start.
  std::deque<PredictedChunk> waiting_;  // for a lane
  std::deque<Held> held_;               // in the predicted order
  uint64_t next_position_ = 1;
  size_t under_way_ = 0;  // chunks that have started and are not done
  size_t withdrawn_ = 0;  // chunks under way of withdrawn tensors
  size_t hop_bytes_ = 0;  // bytes of the hops that chunks under way are at
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_START_QUEUE_H_
