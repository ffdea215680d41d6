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

#include <cstdint>
#include <set>

namespace thinwire {

class PlanWindow {
 public:
  // Chunks under way at once, beside the oldest.
  void SetLimit(int chunks) { limit_ = chunks; }

  // A chunk is known by its place in the plan. It takes a lane, is ready, starts and finishes.
  void Hold(uint64_t place) { held_.insert(place); }
  void Ready(uint64_t place) { ready_.insert(place); }
  bool MayStart(uint64_t place) const;
  void Start(uint64_t place);
  void Finish(uint64_t place);

 private:
  int limit_ = 1;
  int started_ = 0;
  std::set<uint64_t> held_;   // and not finished
  std::set<uint64_t> ready_;  // and not started
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_PLAN_WINDOW_H_
