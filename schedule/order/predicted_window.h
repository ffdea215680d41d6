// PredictedWindow: which predicted chunk may start. Pure logic, not thread-safe.
//
// A predicted chunk takes its lane before it is ready, and its two hops share the link with those
// of all others. If every lane sent at once, a chunk that is urgent would wait for what the others
// have sent before it; so only as many are under way as keep the link busy. All ranks agree on the
// order of chunks but not on when each is ready, so a window alone could hold what a peer waits
// for: the oldest chunk that is not finished starts in any case, and is finished on all ranks in
// the end.
#ifndef THINWIRE_SCHEDULE_ORDER_PREDICTED_WINDOW_H_
#define THINWIRE_SCHEDULE_ORDER_PREDICTED_WINDOW_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>

namespace thinwire {

class PredictedWindow {
 public:
  // Bytes of fp32 input that are under way at once, beside the oldest chunk; or one chunk.
  void SetLimit(size_t bytes) { limit_ = bytes; }

  // A chunk is known by its position in the predicted order. It takes a lane, is ready, starts and
  // finishes.
  void Hold(uint64_t position) { held_[position] = 0; }
  void Ready(uint64_t position, size_t bytes);
  bool MayStart(uint64_t position) const;
  void Start(uint64_t position);
  void Finish(uint64_t position);

  size_t held() const { return held_.size(); }
  // Chunks of so many bytes that may be under way at once.
  size_t AtOnce(size_t bytes) const { return std::max<size_t>(1, limit_ / bytes) + 1; }

 private:
  size_t limit_ = 0;
  size_t started_ = 0;               // bytes
  std::map<uint64_t, size_t> held_;  // and not finished, with their bytes once they are ready
  std::set<uint64_t> ready_;         // and not started
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_PREDICTED_WINDOW_H_
