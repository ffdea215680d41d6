// FORMAT.md describes the code, every listed codec is complete, and the bytes never change.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <utility>
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

// tests/golden/NAME.bin holds the encoded shard, then the residuals. THINWIRE_WRITE_GOLDEN=1
// rewrites them, which only a change of the format and its version may need.
TEST(Format, GoldenFilesNeverChange) {
  std::vector<std::string> specs = {"int4:block=128",           "int4:hadamard=1",
                                    "int8:rounding=stochastic", "adaptive:bits=3.5,floor=1",
                                    "adaptive:bits=0.5",        "ternary:threshold=300"};
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

std::vector<float> Decoded(const Backend& backend, const CodecSpec& spec,
                           const std::vector<uint8_t>& wire, size_t n) {
  std::vector<float> values(n);
  backend.Decode(spec, wire.data(), {values.data(), n});
  return values;
}

// FORMAT.md's rules that its examples do not show, for both implementations.
class FormatRules : public testing::TestWithParam<const Backend*> {
 protected:
  static const Backend& backend() { return *GetParam(); }
  static std::vector<uint8_t> EncodeBy(const CodecSpec& spec, const std::vector<float>& values) {
    std::vector<uint8_t> wire(EncodedBytes(spec, values.size()));
    backend().Encode(spec, {const_cast<float*>(values.data()), values.size()}, nullptr,
                     wire.data());
    return wire;
  }
  static uint16_t HeadOf(float rms) {
    const std::vector<uint8_t> wire =
        EncodeBy(*CodecSpec::Parse("adaptive"), std::vector<float>(256, rms));
    return static_cast<uint16_t>(wire[0] | wire[1] << 8);
  }
};
INSTANTIATE_TEST_SUITE_P(Both, FormatRules, testing::Values(&CpuBackend(), &ScalarBackend()),
                         [](const auto& info) { return info.index == 0 ? "simd" : "scalar"; });

TEST_P(FormatRules, Fp32KeepsTheBitsOfANan) {
  const uint32_t signalling[] = {0x7f800001, 0xffa00000, 0x7fc12345};
  std::vector<float> values(3);
  std::memcpy(values.data(), signalling, sizeof(signalling));
  const std::vector<uint8_t> wire = EncodeBy(*CodecSpec::Parse("fp32"), values);
  EXPECT_EQ(std::memcmp(wire.data(), signalling, sizeof(signalling)), 0);
}

TEST_P(FormatRules, AdaptiveComparesRootsBeforeTheyAreRounded) {
  EXPECT_EQ(HeadOf(0x1p116f), 0x7fc0);
  EXPECT_EQ(HeadOf(std::nextafter(0x1p116f, 0.0f)), 0x7980) << "rounds to 2^116, and is finite";
  EXPECT_EQ(HeadOf(0x1p-100f), 0x0d80);
  EXPECT_EQ(HeadOf(std::nextafter(0x1p-100f, 0.0f)), 0) << "would round to 2^-100";
}

TEST_P(FormatRules, AdaptiveZerosHaveTheSignOfTheirFactor) {
  const CodecSpec spec = *CodecSpec::Parse("adaptive:bits=1");
  std::vector<uint8_t> wire(EncodedBytes(spec, 256));
  wire[0] = 0x80, wire[1] = 0x3f;  // a head of 1; all signs are positive, so only M_0 is not 0
  const std::vector<float> values = Decoded(backend(), spec, wire, 256);
  EXPECT_NE(values[0], 0.0f);
  size_t negative = 0;
  for (size_t i = 1; i < 256; ++i) {
    EXPECT_EQ(values[i], 0.0f);
    negative += std::signbit(values[i]) ? 1 : 0;
  }
  EXPECT_GT(negative, 64u);
  EXPECT_LT(negative, 192u);
}

TEST_P(FormatRules, PaddingOfHeadsIsNotRead) {
  for (const char* text : {"int8", "int4", "onebit", "adaptive"}) {
    const CodecSpec spec = *CodecSpec::Parse(text);
    const std::vector<float> values = GoldenInput(300);
    std::vector<uint8_t> wire = EncodeBy(spec, values);
    const std::vector<float> expected = Decoded(backend(), spec, wire, values.size());
    for (size_t i = 4; i < 16; ++i) wire[i] = 0xa5;  // two blocks have 4 bytes of heads
    EXPECT_TRUE(CheckWire(spec, {wire.data(), wire.size()}, values.size()).ok()) << text;
    EXPECT_EQ(Decoded(backend(), spec, wire, values.size()), expected) << text;
  }
}

TEST_P(FormatRules, AdaptiveHeadsOfNoEncoderHaveCodesAndAreRefusedBeforehand) {
  const CodecSpec spec = *CodecSpec::Parse("adaptive:bits=1");
  for (const uint16_t head : {0x0001, 0x0d7f, 0x7981, 0x7f7f}) {
    std::vector<uint8_t> wire(EncodedBytes(spec, 256));
    wire[0] = static_cast<uint8_t>(head), wire[1] = static_cast<uint8_t>(head >> 8);
    EXPECT_TRUE(absl::IsInvalidArgument(CheckWire(spec, {wire.data(), wire.size()}, 256)));
    const uint32_t bits = uint32_t{head} << 16;
    float rms;
    std::memcpy(&rms, &bits, sizeof(rms));
    // M_0 = 256 * 26 at width 1, times a sixteenth of the head in 32nds.
    EXPECT_EQ(std::fabs(Decoded(backend(), spec, wire, 256)[0]), 6656.0f * (rms / 16 / 32));
  }
}

TEST_P(FormatRules, AdaptiveIsBiasedAsTheTextSays) {
  std::mt19937 random(5489);
  std::normal_distribution<float> normal;
  std::vector<float> values(256 * 400);
  for (float& value : values) value = normal(random);
  for (const auto& [text, expected] :
       {std::pair("adaptive:bits=1", 0.35), std::pair("adaptive:bits=2", 0.12),
        std::pair("adaptive:bits=3", 0.035), std::pair("adaptive:bits=4", 0.01)}) {
    const CodecSpec spec = *CodecSpec::Parse(text);
    const std::vector<float> decoded =
        Decoded(backend(), spec, EncodeBy(spec, values), values.size());
    double both = 0, squares = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      both += double{values[i]} * decoded[i];
      squares += double{values[i]} * values[i];
    }
    EXPECT_NEAR(1 - both / squares, expected, 0.005) << text;
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
    // A draft may use the reference in place of SIMD loops; a listed codec would be too slow.
    const CodecInfo& info = InfoOf(codec.id);
    const bool own = codec.entries() ? info.simd.encode_entries != info.scalar.encode_entries
                                     : info.simd.encode != info.scalar.encode;
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
