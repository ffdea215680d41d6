#include "compress/codecs/ternary.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/numbers.h"
#include "compress/codecs/int4.h"
#include "compress/codecs/reference.h"
#include "compress/simd_kernels.h"

namespace thinwire::codecs {
namespace {

// Parameters.

// The shortest text that parses as the same number.
std::string Print(float threshold) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), threshold).ptr};
}

std::optional<std::string> ParseThreshold(const std::string& value, CodecSpec* spec) {
  constexpr float kLeast = 1e-30f, kMost = 1e30f;
  float parsed = 0;
  if (!absl::SimpleAtof(value, &parsed) || std::isnan(parsed)) return Print(CodecSpec{}.threshold);
  const float nearest = std::clamp(parsed, kLeast, kMost);
  if (nearest != parsed) return Print(nearest);
  spec->threshold = parsed;
  return std::nullopt;
}

constexpr ParameterInfo kThreshold = {
    .key = "threshold",
    .range = "a number from 1e-30 to 1e30",
    .help = "What an element is sent as, once it and what was not sent before add up to it.",
    .parse = ParseThreshold,
    .print = [](const CodecSpec& spec) { return Print(spec.threshold); }};

constexpr const ParameterInfo* kParameters[] = {&kThreshold};

// A mean of several ranks' codes has more levels than two bits.
CodecSpec DefaultDown(const CodecSpec&) { return {.id = Int4::kTraits.id}; }

// The reference, which also handles the elements after the loops' last group.

constexpr unsigned kPlus = 1, kNotFinite = 2, kMinus = 3;  // two's complement, except -2

unsigned CodeOf(float x, float threshold) {
  if (!IsFinite(x)) return kNotFinite;
  return x >= threshold ? kPlus : x <= -threshold ? kMinus : 0;
}

float ValueAt(const uint8_t* codes, size_t i, float threshold) {
  switch (codes[i / 4] >> (2 * (i % 4)) & 3) {
    case kPlus: return threshold;
    case kMinus: return -threshold;
    case kNotFinite: return std::numeric_limits<float>::quiet_NaN();
    default: return 0.0f;
  }
}

void EncodeReference(const Piece& piece, const float* g, float* r, uint8_t* wire) {
  const float threshold = piece.shard.spec.threshold;
  uint8_t* const codes = wire + piece.codes_offset();
  std::memset(codes, 0, piece.codes_bytes());
  for (size_t i = 0; i < piece.numel; ++i) {
    const float x = InputAt(g, r, i);
    const unsigned code = CodeOf(x, threshold);
    codes[i / 4] |= static_cast<uint8_t>(code << (2 * (i % 4)));
    if (r != nullptr && code != kNotFinite) Put(r, i, x - ValueAt(codes, i, threshold));
  }
}

void DecodeReference(const Piece& piece, const uint8_t* wire, float* out) {
  const uint8_t* const codes = wire + piece.codes_offset();
  for (size_t i = 0; i < piece.numel; ++i) {
    Put(out, i, ValueAt(codes, i, piece.shard.spec.threshold));
  }
}

void DecodeAddReference(const Piece& piece, const uint8_t* wire, float* sum) {
  const uint8_t* const codes = wire + piece.codes_offset();
  for (size_t i = 0; i < piece.numel; ++i) {
    Put(sum, i, Get<float>(sum, i) + ValueAt(codes, i, piece.shard.spec.threshold));
  }
}

// The loops.

void Encode(const Piece& piece, const float* g, float* r, uint8_t* wire) {
  const size_t done = piece.numel / simd::kTernaryGroup * simd::kTernaryGroup;
  simd::EncodeTernary(g, r, piece.shard.spec.threshold, wire + piece.codes_offset(), done);
  EncodeReference({piece.shard, piece.begin + done, piece.numel - done}, g + done,
                  r == nullptr ? nullptr : r + done, wire);
}

void Decode(const Piece& piece, const uint8_t* wire, float* out) {
  const size_t done = piece.numel / simd::kTernaryGroup * simd::kTernaryGroup;
  simd::DecodeTernary(wire + piece.codes_offset(), piece.shard.spec.threshold, out, done);
  DecodeReference({piece.shard, piece.begin + done, piece.numel - done}, wire, out + done);
}

void DecodeAdd(const Piece& piece, const uint8_t* wire, float* sum) {
  StageBuffer values;
  for (size_t done = 0; done < piece.numel; done += kStage) {
    const size_t count = std::min(kStage, piece.numel - done);
    Decode({piece.shard, piece.begin + done, count}, wire, values.data());
    simd::Add(sum + done, values.data(), count);
  }
}

}  // namespace

const CodecInfo& Ternary::Info() {
  static constexpr CodecInfo info = {
      .traits = kTraits,
      .help = "0 or plus or minus a threshold, as MXNet's 2bit: two bits an element.",
      .parameters = kParameters,
      .scalar = {.encode = EncodeReference,
                 .decode = DecodeReference,
                 .decode_add = DecodeAddReference},
      .simd = {.encode = Encode, .decode = Decode, .decode_add = DecodeAdd},
      .default_down = DefaultDown};
  return info;
}

}  // namespace thinwire::codecs
