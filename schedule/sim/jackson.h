// Jackson's preemptive schedule: on one machine always run the released job of the longest tail.
// No schedule, preemptive or not, ends earlier; so it bounds what any order of chunks can reach.
// Jackson, "Scheduling a production line to minimize maximum tardiness", UCLA 1955; Carlier, "The
// one-machine sequencing problem", EJOR 11 (1982), section 2.
#ifndef THINWIRE_SCHEDULE_SIM_JACKSON_H_
#define THINWIRE_SCHEDULE_SIM_JACKSON_H_

#include <vector>

namespace thinwire::sim {

// Seconds.
struct Job {
  double release = 0.0;  // when the gradient is there on all ranks
  double length = 0.0;   // of its bytes on the link
  double tail = 0.0;     // what must still be computed after it
};

// The least possible max over jobs of (end + tail).
double JacksonBound(const std::vector<Job>& jobs);

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_JACKSON_H_
