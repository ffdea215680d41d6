// StartQueue: the chunks that rank 0 has ordered, until they start on this rank and are done.
//
// Announced chunks start in the announced order, as many at a time as there are lanes, and with
// Matching::kByOrder predicted ones stand among them. With kByTag each predicted chunk starts when
// its rank has submitted it, as a window lets it. A chunk that cannot be this rank's fails the
// group. Starts and failures go into the outbox. Not thread-safe.
//
// A predicted chunk takes its lane before it is ready, and its hops share the link with those of
// all others. If every lane sent at once, a chunk that is urgent would wait for what the others
// have sent before it; so only as many bytes are under way as keep the link busy: a window. A chunk
// counts with the bytes of the hop that it is at. If it counted whole, from its start to its end,
// the window would have to hold what the link carries in all hops' latencies; a step's first chunks
// would fill that at once, and then their later hops would stand before what is urgent. All ranks
// agree on the order of chunks but not on when each is ready, so a window alone could hold what a
// peer waits for: the oldest chunk that is not finished starts in any case, and is finished on all
// ranks in the end.
//
// A chunk that overtakes another, which its rank has not submitted yet, may fill half of the
// window. All of it would fill, while a backward pass goes on, with what is ready and not urgent,
// and then hold what is urgent; none of it would leave the link idle behind a tensor that is late.
//
// A predicted tensor that rank 0's step lacks is withdrawn, or its chunks would be held for ever;
// and so is one that all ranks have, where a rank waits for it and has yet to submit what stands
// before it. All ranks hear of it between the same orders. A rank that has it already, since it is
// a step ahead, may have started chunks of it. These go on, and are the same exchanges as those
// that rank 0 announces once all ranks have the tensor: so this rank passes over their
// announcements, and the others start them. Until then they wait for peers that may wait for the
// predicted order. So they are no part of it any more: their lanes do not count, and the oldest
// chunk, which starts in any case, is the oldest of the others.
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

// A tensor that a rank has submitted and not finished. The simulator has one for each of thousands
// of ranks, so it is small.
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
// tensor lie side by side, since what happens to a tensor happens to it on all ranks within a short
// time: entries in a map of each rank would be fetched from memory every time. Not thread-safe.
class TensorBook {
 public:
  // It is of `ranks` ranks, the first of which is `first`.
  TensorBook(int first, int ranks) : first_(first), ranks_(ranks) {}

  // Null if the rank has none.
  OwnTensor* Find(int rank, uint64_t id) {
    Row* const row = rows_.Find(id);
    if (row == nullptr) return nullptr;
    OwnTensor& own = row->of[rank - first_];
    return own.report == nullptr ? nullptr : &own;
  }

  // In place of what the rank had under the id. The tensor has a report.
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

  // Calls visit(tensor) for each of the rank's, in no order.
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
  // Predicted chunks that hold a lane before they start. With more of them ranks that are ready
  // with different chunks start more that their peers do not have yet.
  static constexpr size_t kAhead = 4;

  // `hop_shares`: of a chunk's bytes, by hop; 0 inside nodes, where a chunk counts with the hop
  // between nodes that it comes to next. Whatever the hops of a chunk's own algorithm, and whether
  // their ends are heard of, it counts until OnDone at most. `book` and `outbox` outlive the queue,
  // which counts the started chunks of the rank's tensors.
  StartQueue(int rank, const Options& options, Matching matching, std::vector<double> hop_shares,
             TensorBook& book, Outbox& outbox);

  void Append(const std::vector<Announcement>& announcements);
  void Append(const std::vector<PredictedChunk>& chunks);
  // These tensors' chunks are predicted no more. With Matching::kByTag only: where all chunks start
  // in one order, those that have started would have another place in it.
  void Withdraw(const std::vector<Withdrawal>& withdrawn);
  // Starts all that may start now.
  void Start(double now);
  void OnHopDone(const StartChunk& chunk);
  void OnDone(const StartChunk& chunk);

  // Says who waits for what, for people.
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
    size_t bytes = 0;  // of fp32 input; not before it is ready
    size_t hop = 0;    // from 0
    bool withdrawn = false;
  };

  // Bytes of fp32 input whose hops are under way at once as the chunk starts, its own first hop
  // included, unless it is the oldest or the only one.
  static size_t Window(const PredictedChunk& chunk) { return size_t{chunk.window_kib} << 10; }

  void StartOrdered(double now);
  void StartPredicted(double now);
  Held* NextPredicted();
  void HoldMore();
  std::deque<Held>::iterator Find(uint64_t position);
  // Bytes of the hop that the chunk is at; 0 behind the last one.
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
  std::vector<double> hop_shares_;  // inside nodes those of the next hop
  size_t hops_ = 0;                 // between nodes
  TensorBook& book_;
  Outbox& outbox_;

  RingQueue<Ordered> ordered_;  // announced, and with kByOrder predicted, not started
  int running_ = 0;             // of what was ordered
  // Chunks of withdrawn tensors that had started, and have not been announced, by tensor: those
  // below this number. The tensor may be done here when its announcement comes.
  RecycledMap<uint32_t> started_ahead_;

  // With kByTag, from the prediction to the end. Those under way hold a lane, and so do the first
  // few that are not; of these the window says which start.
  std::deque<PredictedChunk> waiting_;  // for a lane
  std::deque<Held> held_;               // in the predicted order
  uint64_t next_position_ = 1;
  size_t under_way_ = 0;  // chunks that have started and are not done
  size_t withdrawn_ = 0;  // of those, of withdrawn tensors
  size_t hop_bytes_ = 0;  // of those, of the hops that they are at
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_START_QUEUE_H_
