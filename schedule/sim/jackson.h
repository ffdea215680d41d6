// Jackson's preemptive schedule: one machine always runs the released job with the longest tail. No
// schedule, preemptive or not, ends earlier, so its end is a lower bound for any order of chunks.
// Jackson, "Scheduling a production line to minimize maximum tardiness", UCLA 1955; Carlier, "The
// one-machine sequencing problem", EJOR 11 (1982), section 2.
#ifndef THINWIRE_SCHEDULE_SIM_JACKSON_H_
#define THINWIRE_SCHEDULE_SIM_JACKSON_H_

#include <vector>

namespace thinwire::sim {

// Seconds.
struct Job {
  double release = 0.0;  // when all ranks have the gradient
  double length = 0.0;   // time of its bytes on the link
  double tail = 0.0;     // computation that remains after it
};

// The least possible max over jobs of (end + tail).
double JacksonBound(const std::vector<Job>& jobs);

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_JACKSON_H_
