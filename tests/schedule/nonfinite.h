// The effect of NaN and Inf on some ranks on all ranks.
#ifndef THINWIRE_TESTS_SCHEDULE_NONFINITE_H_
#define THINWIRE_TESTS_SCHEDULE_NONFINITE_H_

#include <cmath>
#include <limits>
#include <vector>

#include "tests/schedule/ranks.h"

namespace thinwire {

// In one of four steps rank 1 has an Inf and the last rank a NaN. Every rank's result is not finite
// in the two blocks of 256 that contain them, in that step only.
inline void ExpectNonFiniteLeavesNoTrace(int world, const Options& options) {
  RunRanks(Wire::kInProcess, world, options, [&](int rank, Engine& engine) {
    for (int step = 0; step < 4; ++step) {
      std::vector<float> values = Gradient(4096, 3, rank, step);
      if (step == 1 && rank == 1) values[700] = std::numeric_limits<float>::infinity();
      if (step == 1 && rank == world - 1) values[3000] = std::numeric_limits<float>::quiet_NaN();
      ASSERT_TRUE(AllReduce(engine, values, "g").ok());
      for (size_t i = 0; i < values.size(); ++i) {
        const bool hit = step == 1 && (i / 256 == 700 / 256 || i / 256 == 3000 / 256);
        ASSERT_EQ(std::isfinite(values[i]), !hit) << "step " << step << ", element " << i;
      }
    }
  });
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_SCHEDULE_NONFINITE_H_
