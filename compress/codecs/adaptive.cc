#include "compress/codecs/adaptive.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "compress/backend.h"
#include "compress/codec_info.h"
#include "compress/types.h"

namespace thinwire::codecs {
namespace {

// Parameters.

// Stored in sixteenths: a shard's size must be the same number on every rank and machine.
std::optional<std::string> ParseBits(const std::string& value, CodecSpec* spec) {
  double parsed = 0;
  const bool number = absl::SimpleAtod(value, &parsed) && std::isfinite(parsed);
  const double sixteenths = std::round(16.0 * std::clamp(number ? parsed : 2.0, 0.5, 6.0));
  if (!number || sixteenths != 16.0 * parsed) return absl::StrCat(sixteenths / 16.0);
  spec->sixteenths = static_cast<uint32_t>(sixteenths);
  return std::nullopt;
}

std::optional<std::string> ParseFloor(const std::string& value, CodecSpec* spec) {
  uint32_t parsed = 0;
  if (!absl::SimpleAtoi(value, &parsed)) return "0";
  if (parsed > 2) return "2";
  spec->floor = parsed;
  return std::nullopt;
}

constexpr ParameterInfo kBits = {
    .key = "bits",
    .range = "0.5 to 6 in steps of 1/16",
    .help = "Bits of a code, the mean over the blocks of a shard.",
    .parse = ParseBits,
    .print = [](const CodecSpec& spec) { return absl::StrCat(spec.sixteenths / 16.0); }};
constexpr ParameterInfo kFloor = {
    .key = "floor",
    .range = "0, 1 or 2",
    .help = "Bits of a code in the smallest blocks.",
    .parse = ParseFloor,
    .print = [](const CodecSpec& spec) { return absl::StrCat(spec.floor); }};

constexpr const ParameterInfo* kParameters[] = {&kBits, &kFloor, &kBlock, &kSeed};

absl::Status Check(const CodecSpec& spec) {
  if (spec.block != kTransform) {
    return absl::InvalidArgumentError(
        absl::StrCat("adaptive transforms 256 elements at once, got block=", spec.block,
                     "; leave the block out"));
  }
  if (16 * spec.floor <= spec.sixteenths) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("floor=", spec.floor, " needs bits=", spec.floor,
                                                 " or more, got bits=", spec.sixteenths / 16.0));
}

// Wire bytes.

// True for heads that an encoder can produce.
bool IsHead(uint16_t head) {
  return head == 0 || (head >= kFirstHead && head <= kHugeHead) || head == kNanScale;
}

// The bytes of a shard's codes, from the widths that its heads imply.
size_t CodesBytes(const Shard& shard, const uint8_t* wire) {
  static const bool available = SimdAvailable();  // as in CpuBackend()
  Walk walk;
  (available ? Adaptive::kSimd : Adaptive::kReference).begin(shard, wire, &walk);
  size_t planes = 0;
  for (size_t b = 0; b < shard.layout.blocks; ++b) {
    planes += AdaptiveWidth(Get<uint16_t>(wire, b), walk.threshold - (b < walk.raised ? 1 : 0),
                            static_cast<int>(shard.spec.floor));
  }
  return planes * kPlaneBytes;
}

absl::Status CheckWire(const CodecSpec& spec, const uint8_t* wire, size_t numel) {
  const Shard shard(spec, numel);
  for (size_t b = 0; b < shard.layout.blocks; ++b) {
    const uint16_t head = Get<uint16_t>(wire, b);
    if (IsHead(head)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the head of adaptive block ", b, " is ", absl::Hex(head, absl::kZeroPad4),
                     " in hexadecimal; expected 0, ", absl::Hex(kFirstHead, absl::kZeroPad4),
                     " to ", absl::Hex(kHugeHead, absl::kZeroPad4), " or ", absl::Hex(kNanScale)));
  }
  const size_t used = CodesBytes(shard, wire);
  const uint8_t* const codes = wire + shard.layout.codes_at;
  if (std::all_of(codes + used, codes + shard.layout.codes_bytes,
                  [](uint8_t byte) { return byte == 0; })) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "the widths of the adaptive blocks add up to ", used, " bytes of codes, and of the ",
      shard.layout.codes_bytes - used, " bytes behind them some are not 0"));
}

}  // namespace

const CodecInfo& Adaptive::Info() {
  static const CodecInfo info = {
      .traits = kTraits,
      .help = "Bits of a block by its size, Hadamard transform: for slow links.",
      .parameters = kParameters,
      .scalar = kReference,
      .simd = kSimd,
      .check = Check,
      .check_wire = CheckWire};
  return info;
}

}  // namespace thinwire::codecs
