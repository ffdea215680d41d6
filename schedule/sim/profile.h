// Profile: the computation of a training step between its exchanges.
#ifndef THINWIRE_SCHEDULE_SIM_PROFILE_H_
#define THINWIRE_SCHEDULE_SIM_PROFILE_H_

#include <cstddef>
#include <string>
#include <vector>

namespace thinwire::sim {

// Elements that are reduced together, and the computation of the layers that they belong to.
struct Unit {
  size_t numel = 0;
  double forward_s = 0.0;  // includes its optimizer step
  double backward_s = 0.0;
};

struct Profile {
  std::string name;
  std::vector<Unit> units;  // in forward order; backward goes from the last to the first
  double between_s = 0.0;   // after backward, before the first unit is used again
};

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_PROFILE_H_
