// StartQueue: the chunks that rank 0 has ordered, until they start on this rank and are done.
//
// Announced chunks start in the announced order, as many at a time as there are lanes; predicted
// ones as PredictedQueue says, or, with Matching::kByOrder, among the announced ones. A chunk that
// cannot be this rank's fails the group. Starts and failures go into the outbox. Not thread-safe.
#ifndef THINWIRE_SCHEDULE_ORDER_START_QUEUE_H_
#define THINWIRE_SCHEDULE_ORDER_START_QUEUE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "schedule/options.h"
#include "schedule/order/frames.h"
#include "schedule/order/outbox.h"
#include "schedule/order/predicted_queue.h"
#include "schedule/recycled.h"
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
  explicit TensorBook(int ranks) : ranks_(ranks) {}

 private:
  friend class OwnTensors;
  struct Row {
    std::vector<OwnTensor> of;  // by rank
    int taken = 0;
  };

  const int ranks_;
  RecycledMap<Row> rows_;  // by id; the values of a spare row are all empty
};

// A rank's part of a book, which outlives it.
class OwnTensors {
 public:
  OwnTensors(TensorBook& book, int rank) : book_(book), rank_(rank) {}

  // Null if there is none.
  OwnTensor* Find(uint64_t id) const {
    TensorBook::Row* const row = book_.rows_.Find(id);
    if (row == nullptr) return nullptr;
    OwnTensor& own = row->of[rank_];
    return own.report == nullptr ? nullptr : &own;
  }

  // In place of what the id had. The tensor has a report.
  void Insert(uint64_t id, OwnTensor tensor) {
    TensorBook::Row& row = book_.rows_.Insert(id);
    row.of.resize(book_.ranks_);
    if (row.of[rank_].report == nullptr) ++row.taken;
    row.of[rank_] = std::move(tensor);
  }

  void Erase(uint64_t id) {
    TensorBook::Row* const row = book_.rows_.Find(id);
    if (row == nullptr || row->of[rank_].report == nullptr) return;
    row->of[rank_] = OwnTensor();
    if (--row->taken == 0) book_.rows_.Erase(id);
  }

  // Calls visit(tensor) for each, in no order.
  template <typename Visit>
  void ForEach(Visit visit) {
    for (auto& [id, row] : book_.rows_) {
      if (row.of[rank_].report != nullptr) visit(row.of[rank_]);
    }
  }

 private:
  TensorBook& book_;
  const int rank_;
};

class StartQueue {
 public:
  // `own` and `outbox` outlive the queue; it counts the tensors' started chunks.
  StartQueue(int rank, const Options& options, Matching matching, std::vector<double> hop_shares,
             OwnTensors& own, Outbox& outbox);

  void Append(const std::vector<Announcement>& announcements);
  void Append(const std::vector<PredictedChunk>& chunks);
  // Starts all that may start now.
  void Start(double now);
  void OnHopDone(const StartChunk& chunk) { predicted_.EndHop(chunk.position); }
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

  void StartOrdered(double now);
  void StartPredicted(double now);
  bool AsPredicted(const Report& report, uint64_t partition_hash);
  bool IsLeft(uint32_t chunk, OwnTensor* own);
  void Fail(absl::Status reason);

  const int rank_, lanes_;
  const size_t chunk_bytes_;
  const Matching matching_;
  OwnTensors& own_;
  Outbox& outbox_;
  RingQueue<Ordered> ordered_;  // announced, and with kByOrder predicted, not started
  int running_ = 0;             // of what was ordered
  PredictedQueue predicted_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_START_QUEUE_H_
