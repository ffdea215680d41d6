// Absence: parameters that this rank has no gradient for in this step. They count as zeros, and
// what is kept of them here waits for a step that has one: sent now it would be lost where nobody
// uses the mean, as of a parameter that no rank has a gradient for.
#ifndef THINWIRE_SCHEDULE_ABSENCE_H_
#define THINWIRE_SCHEDULE_ABSENCE_H_

#include <span>
#include <vector>

#include "compress/backend.h"
#include "compress/error_feedback.h"
#include "schedule/lane_buffers.h"

namespace thinwire {

// Of one chunk. The codec sees nothing of what was kept, and its own loss (onebit has no zero) is
// added to it, so that the bookkeeping stays exact.
class Absence {
 public:
  // `ranges` of `kept` (a float an element) take no part.
  void Add(std::span<const Range> ranges, std::span<float> kept, LaneBuffers& buffers);

  void Before(const Backend& backend) const;  // the encoding
  void After(const Backend& backend) const;

 private:
  struct Held {
    std::span<float> kept, aside;
  };
  std::vector<Held> held_;
};

// The parts of `ranges` that lie in `within`, and not in `without`; counted from within.begin.
std::vector<Range> Overlap(std::span<const Range> ranges, Range within, Range without);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ABSENCE_H_
