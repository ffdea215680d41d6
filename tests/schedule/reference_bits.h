// An engine over many steps of one tensor, against the reference.
#ifndef THINWIRE_TESTS_SCHEDULE_REFERENCE_BITS_H_
#define THINWIRE_TESTS_SCHEDULE_REFERENCE_BITS_H_

#include <vector>

#include "tests/schedule/ranks.h"
#include "tests/schedule/reference.h"

namespace thinwire {

// Expects every rank's results of all steps to have the reference's bits.
inline void ExpectTheReferencesBits(std::vector<Transport> transports, const Options& options,
                                    size_t numel, int steps) {
  const int world = static_cast<int>(transports.size());
  ReferenceAllReduce reference(world, options);
  std::vector<std::vector<float>> expected;
  for (int step = 0; step < steps; ++step) {
    std::vector<std::vector<float>> gradients;
    for (int r = 0; r < world; ++r) gradients.push_back(Gradient(numel, 1, r, step));
    expected.push_back(world == 1 ? gradients[0]
                                  : reference.Step(gradients, 1.0f / static_cast<float>(world)));
  }
  RunRanks(std::move(transports), options, [&](int rank, Engine& engine) {
    for (int step = 0; step < steps; ++step) {
      std::vector<float> values = Gradient(numel, 1, rank, step);
      ASSERT_TRUE(AllReduce(engine, values, "g").ok()) << engine.status();
      ASSERT_EQ(values, expected[step]) << options.codecs[0].ToString() << ", rank " << rank
                                        << " of " << world << ", step " << step;
    }
  });
}

inline void ExpectTheReferencesBits(Wire wire, int world, const Options& options, size_t numel,
                                    int steps) {
  ExpectTheReferencesBits(Connect(wire, world), options, numel, steps);
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_SCHEDULE_REFERENCE_BITS_H_
