// Absence: parameters that this rank has no gradient for in this step. They count as zeros, and
// their residuals wait for a step that has a gradient: sent now they would be lost where nobody
// uses the mean, as for a parameter that no rank has a gradient for.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_ABSENCE_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_ABSENCE_H_

#include <span>
#include <vector>

#include "compress/arithmetic.h"
#include "compress/error_feedback.h"
#include "schedule/collective/scratch.h"

namespace thinwire {

// The absent ranges of one chunk. The codec sees nothing of their residuals, and its own loss
// (onebit has no zero) is added to them afterwards, so that the bookkeeping stays exact.
class Absence {
 public:
  // `ranges` of `kept` (a float an element) take no part.
  void Add(std::span<const Range> ranges, std::span<float> kept, Scratch& scratch);

  void SetAside(const Arithmetic& arithmetic);  // before the encoding
  // Undoes SetAside; without one, or a second time, it does nothing.
  void Restore(const Arithmetic& arithmetic);

 private:
  struct Held {
    std::span<float> kept, aside;
  };
  std::vector<Held> held_;
  bool aside_ = false;
};

// The parts of `ranges` that lie in `within`, and not in `without`; counted from within.begin.
std::vector<Range> Overlap(std::span<const Range> ranges, Range within, Range without);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_ABSENCE_H_
