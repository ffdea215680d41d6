// A destroyed group leaves no descriptors and no threads behind.
#include "tests/leaks.h"
#include "tests/schedule/ranks.h"

namespace thinwire {
namespace {

void OneRound(Wire wire) {
  RunRanks(wire, 2, SmallChunks("int4"), [](int rank, Engine& engine) {
    std::vector<float> values = Gradient(3000, 1, rank, 0);
    ASSERT_TRUE(AllReduce(engine, values, "g").ok());
  });
}

TEST(Leaks, NoneIn100Rounds) {
  for (const Wire wire : {Wire::kInProcess, Wire::kGloo}) {
    OneRound(wire);  // creates what stays for the process's lifetime
    const Held before = Held::Now();
    for (int round = 0; round < 100; ++round) OneRound(wire);
    EXPECT_LE(Held::Settled(before), before);
  }
}

}  // namespace
}  // namespace thinwire
