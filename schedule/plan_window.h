// PlanWindow: which planned chunk may start. Pure logic, not thread-safe.
//
// A planned chunk takes its lane before it is ready, and its two hops share the link with those of
// all others. If every lane sent at once, a chunk that is urgent would wait for what the others
// have sent before it; so only as many are under way as keep the link busy. All ranks agree on the
// order of chunks but not on when each is ready, so a window alone could hold what a peer waits
// for: the oldest chunk that is not finished starts in any case, and is finished on all ranks in
// the end.
#ifndef THINWIRE_SCHEDULE_PLAN_WINDOW_H_
#define THINWIRE_SCHEDULE_PLAN_WINDOW_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>

namespace thinwire {

// A planned chunk holds its lane until its rank has submitted it, so there are more than four.
inline constexpr int kPlanLanes = 16;
// That a hop takes on Gloo: the receiver says that it is ready, and then the bytes come.
inline constexpr int kHopLatencies = 2;
// Of a hop, whose worth of bytes the limit has beside a few chunks: those of a chunk's two hops,
// and as much again, since the order is a guess (sched_bench).
inline constexpr int kPlanLatencies = 4;

class PlanWindow {
 public:
  // Bytes of fp32 input that are under way at once, beside the oldest chunk; or one chunk.
  void SetLimit(size_t bytes) { limit_ = bytes; }

  // A chunk is known by its place in the plan. It takes a lane, is ready, starts and finishes.
  void Hold(uint64_t place) { held_[place] = 0; }
  void Ready(uint64_t place, size_t bytes);
  bool MayStart(uint64_t place) const;
  void Start(uint64_t place);
  void Finish(uint64_t place);

 private:
  size_t limit_ = 0;
  size_t started_ = 0;               // bytes
  std::map<uint64_t, size_t> held_;  // and not finished, with their bytes once they are ready
  std::set<uint64_t> ready_;         // and not started
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_PLAN_WINDOW_H_
