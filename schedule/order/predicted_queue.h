// PredictedQueue: a rank's predicted chunks, from the prediction to their end. Those under way hold
// a lane, and so do the first few that are not; of these the window says which start, once their
// rank has submitted them.
#ifndef THINWIRE_SCHEDULE_ORDER_PREDICTED_QUEUE_H_
#define THINWIRE_SCHEDULE_ORDER_PREDICTED_QUEUE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

#include "schedule/order/frames.h"

namespace thinwire {

// Pure logic, not thread-safe.
//
// A predicted chunk takes its lane before it is ready, and its two hops share the link with those
// of all others. If every lane sent at once, a chunk that is urgent would wait for what the others
// have sent before it; so only as many are under way as keep the link busy: a window of bytes. All
// ranks agree on the order of chunks but not on when each is ready, so a window alone could hold
// what a peer waits for: the oldest chunk that is not finished starts in any case, and is finished
// on all ranks in the end.
//
// A chunk that overtakes another, which its rank has not submitted yet, may fill half of the
// window. All of it would fill, while a backward pass goes on, with what is ready and not urgent,
// and then hold what is urgent; none of it would leave the link idle behind a tensor that is late.
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
  size_t AtOnce(size_t bytes) const;

 private:
  enum class Phase { kPredicted, kReady, kStarted };
  struct Held {
    PredictedChunk chunk;
    uint64_t position;
    Phase phase = Phase::kPredicted;
    size_t bytes = 0;  // of fp32 input; not before it is ready
  };

  // Bytes of fp32 input that are under way at once as the chunk starts, its own included, unless it
  // is the oldest or the only one.
  static size_t Window(const PredictedChunk& chunk) { return size_t{chunk.window_kib} << 10; }

  void HoldMore();

  const size_t lanes_;
  std::deque<PredictedChunk> waiting_;  // for a lane
  std::deque<Held> held_;               // in the predicted order
  uint64_t next_position_ = 1;
  size_t started_ = 0, started_bytes_ = 0;  // and not finished
};

template <typename Submitted>
std::optional<PredictedQueue::Started> PredictedQueue::Next(Submitted submitted) {
  bool is_first = true;    // of those that are ready
  bool overtakes = false;  // one that is not
  for (Held& held : held_) {
    if (held.phase == Phase::kPredicted) {
      const Report* const report = submitted(held.chunk.id);
      if (report == nullptr) {
        overtakes = true;
        continue;
      }
      held.bytes = ChunkBytes(*report);
      held.phase = Phase::kReady;
    }
    if (held.phase != Phase::kReady || !std::exchange(is_first, false)) continue;
    const size_t window = Window(held.chunk) / (overtakes ? 2 : 1);
    const bool fits = started_bytes_ == 0 || started_bytes_ + held.bytes <= window;
    if (!fits && &held != &held_.front()) continue;
    held.phase = Phase::kStarted;
    started_bytes_ += held.bytes;
    const Started started{held.chunk, held.position};
    ++started_;
    HoldMore();
    return started;
  }
  return std::nullopt;
}

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_PREDICTED_QUEUE_H_
