#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>

#include "tests/own_folder.h"
#include "tests/schedule/ranks.h"

namespace thinwire {
namespace {

// Every rank records one event per stage of each chunk.
TEST(Trace, HasEveryStageOfEveryChunk) {
  const OwnFolder folder;
  Options options = SmallChunks("int4");
  options.trace_path = folder.File("trace.json");
  RunRanks(Wire::kInProcess, 2, options, [](int rank, Engine& engine) {
    std::vector<float> values = Gradient(10 * 1024, 1, rank, 0);  // 10 chunks of 4096 bytes
    ASSERT_TRUE(AllReduce(engine, values, "a \"quoted\" name").ok());
  });
  for (const char* name : {"trace.rank0.json", "trace.rank1.json"}) {
    std::stringstream text;
    text << std::ifstream(folder.File(name)).rdbuf();
    for (const char* stage : kStageNames) {
      size_t count = 0;
      // Waiting chunks have separate begin and end events, since slices of a row may not overlap.
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
}

struct Slice {
  int row = 0;
  double begin = 0.0, end = 0.0;  // microseconds
};

// Returns by stage the slices of a trace file whose tensor name begins with `name`.
std::map<std::string, std::vector<Slice>> SlicesOf(const std::filesystem::path& file,
                                                   const std::string& name) {
  const std::regex slice(
      R"X("name":"([A-Z]+)","ph":"X","pid":\d+,"tid":(\d+),"ts":([-+.e\d]+),"dur":([-+.e\d]+))X"
      R"X(,"args":\{"tensor":"([^"]*)")X");
  std::map<std::string, std::vector<Slice>> slices;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    std::smatch match;
    if (!std::regex_search(line, match, slice) || match[5].str().rfind(name, 0) != 0) continue;
    const double begin = std::stod(match[3]);
    slices[match[1]].push_back({std::stoi(match[2]), begin, begin + std::stod(match[4])});
  }
  return slices;
}

// Many tensors go at once: each has its slices, and slices of one row, which viewers would nest, do
// not overlap.
TEST(Trace, HasTheStagesOfSmallTensors) {
  constexpr int kTensors = 8;
  const OwnFolder folder;
  Options options;
  options.trace_path = folder.File("trace.json");
  RunRanks(Wire::kInProcess, 2, options, [](int rank, Engine& engine) {
    std::vector<std::vector<float>> values;
    std::vector<UsePtr> works;
    for (int t = 0; t < kTensors; ++t) values.push_back(Gradient(100, t, rank, 0));
    for (int t = 0; t < kTensors; ++t) {
      const auto work = engine.Start({.input = View(values[t]),
                                      .output = View(values[t]),
                                      .key = "small" + std::to_string(t)});
      ASSERT_TRUE(work.ok()) << work.status();
      works.push_back(*work);
    }
    for (const auto& work : works) ASSERT_TRUE(work->Wait().ok());
    std::array<double, kStages> seconds = engine.stats().seconds;
    EXPECT_GT(seconds[static_cast<int>(Stage::kEncode)], 0.0);
    EXPECT_GT(seconds[static_cast<int>(Stage::kDecode)], 0.0);
  });
  for (const char* file : {"trace.rank0.json", "trace.rank1.json"}) {
    std::map<int, std::vector<Slice>> rows;
    for (const auto& [stage, slices] : SlicesOf(folder.File(file), "small")) {
      EXPECT_EQ(slices.size(), static_cast<size_t>(kTensors)) << stage;
      for (const Slice& slice : slices) rows[slice.row].push_back(slice);
    }
    EXPECT_FALSE(rows.empty());
    for (auto& [row, slices] : rows) {
      std::sort(slices.begin(), slices.end(),
                [](const Slice& a, const Slice& b) { return a.begin < b.begin; });
      for (size_t i = 1; i < slices.size(); ++i) {
        EXPECT_LE(slices[i - 1].end, slices[i].begin + 1e-2) << "row " << row;
      }
    }
  }
}

}  // namespace
}  // namespace thinwire
