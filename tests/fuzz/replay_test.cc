// Runs every fuzz target over its corpus and seeded mutations of it, which libFuzzer would try
// first, in every build that has tests.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "tests/effort.h"
#include "tests/fuzz/target.h"

namespace thinwire::fuzz {
namespace {

using Bytes = std::vector<uint8_t>;

std::vector<Bytes> CorpusOf(const Target& target) {
  std::vector<Bytes> corpus;
  const auto folder = std::filesystem::path(THINWIRE_SOURCE_DIR) / "tests/fuzz/corpus";
  for (const auto& file : std::filesystem::directory_iterator(folder / target.name)) {
    std::ifstream in(file.path(), std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  std::sort(corpus.begin(), corpus.end());  // directory order is unspecified
  return corpus;
}

Bytes Mutated(Bytes bytes, const Bytes& other, std::mt19937_64& random) {
  for (int edits = 1 + static_cast<int>(random() % 4); edits > 0; --edits) {
    const size_t place = bytes.empty() ? 0 : random() % bytes.size();
    switch (random() % 5) {
      case 0: bytes.resize(place); break;
      case 1: bytes.insert(bytes.end(), other.begin(), other.end()); break;
      case 2: bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(place), random() % 256); break;
      case 3:
        std::copy_n(other.begin(), std::min(other.size(), bytes.size()), bytes.begin());
        break;
      default:
        if (!bytes.empty()) bytes[place] ^= static_cast<uint8_t>(1 << random() % 8);
    }
  }
  bytes.resize(std::min<size_t>(bytes.size(), 1 << 15));
  return bytes;
}

class Replay : public testing::TestWithParam<Target> {};
INSTANTIATE_TEST_SUITE_P(Fuzz, Replay, testing::ValuesIn(Targets().begin(), Targets().end()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Replay, HoldsOnItsCorpusAndNearIt) {
  const std::vector<Bytes> corpus = CorpusOf(GetParam());
  ASSERT_FALSE(corpus.empty());
  const auto run = [](const Bytes& bytes) {
    Input input(bytes);
    GetParam().run(input);
  };
  for (const Bytes& bytes : corpus) run(bytes);
  std::mt19937_64 random(20240607);
  for (int i = 0; i < Rounds(10000); ++i) {
    run(Mutated(corpus[random() % corpus.size()], corpus[random() % corpus.size()], random));
  }
}

}  // namespace
}  // namespace thinwire::fuzz
