// PredictedQueue: a rank's predicted chunks, from the prediction to their end. Those under way hold
// a lane, and so do the first few that are not; of these the window says which start, once their
// rank has submitted them.
#ifndef THINWIRE_SCHEDULE_ORDER_PREDICTED_QUEUE_H_
#define THINWIRE_SCHEDULE_ORDER_PREDICTED_QUEUE_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>

#include "schedule/order/frames.h"
#include "schedule/order/predicted_window.h"

namespace thinwire {

class PredictedQueue {
 public:
  // Chunks that hold a lane before they start. With more of them ranks that are ready with
  // different chunks start more that their peers do not have yet.
  static constexpr size_t kAhead = 4;

  // `lanes`: at most, with those under way.
  explicit PredictedQueue(int lanes) : lanes_(lanes) {}

  void Append(const PredictedChunk& chunk);

  struct Started {
    PredictedChunk chunk;
    uint64_t position;  // in the predicted order, from 1
  };
  // The next chunk that may start; it counts as started. `submitted(id)`: this rank's report of a
  // tensor, or null while it has none.
  template <typename Submitted>
  std::optional<Started> Next(Submitted submitted);

  void Finish(uint64_t position);

  // The oldest chunk that is not finished; null if there is none.
  const PredictedChunk* oldest() const { return held_.empty() ? nullptr : &held_.front().chunk; }
  size_t size() const { return held_.size() + waiting_.size(); }
  // Chunks of so many bytes that may be under way at once until the next prediction; of smaller
  // ones more.
  size_t AtOnce(size_t bytes) const { return std::min({lanes_, size(), window_.AtOnce(bytes)}); }

 private:
  enum class Phase { kPredicted, kReady, kStarted };
  struct Held {
    PredictedChunk chunk;
    uint64_t position;
    Phase phase = Phase::kPredicted;
  };

  void HoldMore();

  const size_t lanes_;
  std::deque<PredictedChunk> waiting_;  // for a lane
  std::deque<Held> held_;               // in the predicted order
  PredictedWindow window_;
  uint64_t next_position_ = 1;
  size_t started_ = 0;  // and not finished
};

template <typename Submitted>
std::optional<PredictedQueue::Started> PredictedQueue::Next(Submitted submitted) {
  for (Held& held : held_) {
    if (held.phase == Phase::kPredicted) {
      const Report* const report = submitted(held.chunk.id);
      if (report == nullptr) continue;
      window_.Ready(held.position, ChunkBytes(*report));
      held.phase = Phase::kReady;
    }
    if (held.phase != Phase::kReady || !window_.MayStart(held.position)) continue;
    window_.Start(held.position);
    held.phase = Phase::kStarted;
    const Started started{held.chunk, held.position};
    ++started_;
    HoldMore();
    return started;
  }
  return std::nullopt;
}

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_PREDICTED_QUEUE_H_
