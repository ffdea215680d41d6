// FORMAT.md says what the code does, every listed codec is complete, and the bytes never change.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

#include "compress/backend.h"
#include "compress/codec_info.h"
#include "compress/codec_list.h"

namespace thinwire {
namespace {

const std::filesystem::path kSource = THINWIRE_SOURCE_DIR;

std::string ReadAll(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::vector<uint8_t> Encode(const CodecSpec& spec, std::vector<float> values,
                            std::vector<float>* residual) {
  std::vector<uint8_t> wire(EncodedBytes(spec, values.size()));
  CpuBackend().Encode(spec, {values.data(), values.size()},
                      residual == nullptr ? nullptr : residual->data(), wire.data());
  return wire;
}

TEST(Format, WorkedExamplesAreTheCodesBytes) {
  std::istringstream lines(ReadAll(kSource / "compress/FORMAT.md"));
  std::string line, codec;
  std::vector<float> values;
  int examples = 0;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    if (word == "```example") words >> codec;
    if (word == "values") {
      values.clear();
      while (words >> word) values.push_back(std::strtof(word.c_str(), nullptr));
    }
    if (word != "bytes") continue;
    std::vector<uint8_t> bytes;
    while (words >> word) bytes.push_back(static_cast<uint8_t>(std::stoi(word, nullptr, 16)));
    EXPECT_EQ(Encode(*CodecSpec::Parse(codec), values, nullptr), bytes)
        << codec << ", example " << examples;
    ++examples;
  }
  EXPECT_GE(examples, 6);
}

// The input of the golden files, from a formula that any language can repeat: element i is
// ((i * 7919) % 2003 - 1001) * 2^((i / 256) % 9 - 4), and r is ((i * 104729) % 511 - 255) / 256.
std::vector<float> GoldenInput(size_t n) {
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) {
    const int whole = static_cast<int>(i * 7919 % 2003) - 1001;
    values[i] = std::ldexp(static_cast<float>(whole), static_cast<int>(i / 256 % 9) - 4);
  }
  return values;
}
std::vector<float> GoldenResidual(size_t n) {
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i)
    values[i] = static_cast<float>(static_cast<int>(i * 104729 % 511) - 255) / 256.0f;
  return values;
}

constexpr size_t kGoldenElements = 2500;

std::string GoldenBytes(const CodecSpec& spec) {
  std::vector<float> residual = GoldenResidual(kGoldenElements);
  const std::vector<uint8_t> wire = Encode(spec, GoldenInput(kGoldenElements), &residual);
  std::string bytes(wire.begin(), wire.end());
  bytes.append(reinterpret_cast<const char*>(residual.data()), residual.size() * sizeof(float));
  return bytes;
}

// tests/golden/NAME.bin: the encoded shard, then the residuals. THINWIRE_WRITE_GOLDEN=1 writes them
// anew, which a change of the format (and of its version) alone may need.
TEST(Format, GoldenFilesNeverChange) {
  std::vector<std::string> specs = {"int4:block=128", "int4:hadamard=1", "int8:rounding=stochastic",
                                    "adaptive:bits=3.5,floor=1", "adaptive:bits=0.5"};
  for (const CodecTraits& codec : kCodecs) specs.emplace_back(codec.name);
  for (const std::string& text : specs) {
    std::string name = text;
    for (char& c : name) c = c == ':' || c == '=' || c == ',' ? '_' : c;
    const std::filesystem::path path = kSource / "tests/golden" / (name + ".bin");
    const std::string bytes = GoldenBytes(*CodecSpec::Parse(text));
    if (std::getenv("THINWIRE_WRITE_GOLDEN") != nullptr)
      std::ofstream(path, std::ios::binary) << bytes;
    EXPECT_EQ(ReadAll(path), bytes) << path;
  }
}

TEST(CodecList, EveryCodecHasItsSectionGoldenFileSimdLoopAndBenchmark) {
  const std::string format = ReadAll(kSource / "compress/FORMAT.md");
  const std::string bench = ReadAll(kSource / "bench/codec_bench.cc");
  for (const CodecTraits& codec : kCodecs) {
    const std::string name(codec.name);
    EXPECT_EQ(&TraitsOf(codec.id), &codec) << name << " must stand at the place of its id";
    EXPECT_NE(format.find("\n## " + name + "\n"), std::string::npos)
        << "no section in FORMAT.md for " << name;
    EXPECT_TRUE(std::filesystem::exists(kSource / "tests/golden" / (name + ".bin")))
        << "no golden file for " << name << "; THINWIRE_WRITE_GOLDEN=1 writes it";
    EXPECT_EQ(CodecSpec::Parse(name)->id, codec.id);
    // A reference in place of SIMD loops is right for a draft, and too slow for a list of codecs.
    const CodecInfo& info = InfoOf(codec.id);
    const bool own = codec.entries() ? info.simd.entries.encode != info.scalar.entries.encode
                                     : info.simd.dense.encode != info.scalar.dense.encode;
    EXPECT_TRUE(own) << "no SIMD loop for " << name;
    for (const char* extension : {".h", ".cc"}) {
      EXPECT_TRUE(std::filesystem::exists(kSource / "compress/codecs" / (name + extension)))
          << "no compress/codecs/" << name << extension;
    }
  }
  EXPECT_NE(bench.find("for (const CodecTraits& codec : kCodecs)"), std::string::npos);
}

}  // namespace
}  // namespace thinwire
