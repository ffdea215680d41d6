#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/schedule/ranks.h"

namespace thinwire {
namespace {

// One event for each stage of each chunk, on every rank.
TEST(Trace, HasEveryStageOfEveryChunk) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / "thinwire_trace_test";
  std::filesystem::create_directories(folder);
  Options options = SmallChunks("int4");
  options.trace_path = (folder / "trace.json").string();
  RunRanks(Wire::kInProcess, 2, options, [](int rank, Engine& engine) {
    std::vector<float> values = Gradient(10 * 1024, 1, rank, 0);  // 10 chunks of 4096 bytes
    ASSERT_TRUE(AllReduce(engine, values, "a \"quoted\" name").ok());
  });
  for (const char* name : {"trace.rank0.json", "trace.rank1.json"}) {
    std::stringstream text;
    text << std::ifstream(folder / name).rdbuf();
    for (const char* stage : kStageNames) {
      size_t count = 0;
      // A chunk that waits has a begin and an end of its own, since rows may not overlap.
      const char* phase = std::string(stage) == kStageNames[0] ? "b" : "X";
      const std::string needle = std::string("\"name\":\"") + stage + "\",\"ph\":\"" + phase + "\"";
      for (size_t at = text.str().find(needle); at != std::string::npos;
           at = text.str().find(needle, at + 1)) {
        ++count;
      }
      EXPECT_EQ(count, 10u) << stage;
    }
    EXPECT_NE(text.str().find("a \\\"quoted\\\" name"), std::string::npos);
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace thinwire
