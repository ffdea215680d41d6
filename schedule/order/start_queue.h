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
#include <vector>

#include "schedule/options.h"
#include "schedule/order/frames.h"
#include "schedule/order/outbox.h"
#include "schedule/order/predicted_queue.h"
#include "schedule/recycled.h"
#include "transport/planes.h"

namespace thinwire {

// A tensor that this rank has submitted and not finished. The simulator has one for each of
// thousands of ranks, so it is small, and what an order of chunks needs of it comes first.
struct OwnTensor {
  std::shared_ptr<const Report> report;
  uint32_t started = 0;  // chunks
  bool reported = false;
  bool overdue = false;
  std::shared_ptr<void> host;  // for StartChunk::host
  double submitted = 0.0;      // seconds of the sequencer's clock
  double overdue_since = 0.0;
};

using OwnTensors = RecycledMap<OwnTensor>;  // by id

class StartQueue {
 public:
  // `own` and `outbox` outlive the queue; it counts the tensors' started chunks.
  StartQueue(int rank, const Options& options, Matching matching, OwnTensors& own, Outbox& outbox);

  void Append(const std::vector<Announcement>& announcements);
  void Append(const std::vector<PredictedChunk>& chunks);
  // Starts all that may start now.
  void Start(double now);
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
