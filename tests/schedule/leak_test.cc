// A group that is gone leaves no descriptor and no thread behind.
#include <filesystem>

#include "tests/schedule/ranks.h"

namespace thinwire {
namespace {

size_t Entries(const char* folder) {
  size_t count = 0;
  for (auto it = std::filesystem::directory_iterator(folder);
       it != std::filesystem::directory_iterator(); ++it) {
    ++count;
  }
  return count;
}

void OneRound(Wire wire) {
  RunRanks(wire, 2, SmallChunks("int4"), [](int rank, Engine& engine) {
    std::vector<float> values = Gradient(3000, 1, rank, 0);
    ASSERT_TRUE(AllReduce(engine, values, "g").ok());
  });
}

TEST(Leaks, NoneIn100Rounds) {
  for (const Wire wire : {Wire::kInProcess, Wire::kGloo}) {
    OneRound(wire);  // what the first round sets up for good does not count
    const size_t descriptors = Entries("/proc/self/fd"), threads = Entries("/proc/self/task");
    for (int round = 0; round < 100; ++round) OneRound(wire);
    EXPECT_EQ(Entries("/proc/self/fd"), descriptors);
    EXPECT_EQ(Entries("/proc/self/task"), threads);
  }
}

}  // namespace
}  // namespace thinwire
