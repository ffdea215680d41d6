#include "compress/codecs/int4.h"

#include "absl/strings/str_cat.h"
#include "compress/codec_info.h"
#include "compress/codecs/reference.h"

namespace thinwire::codecs {
namespace {

constexpr ParameterInfo kHadamard = {
    .key = "hadamard",
    .range = "0 or 1",
    .help = "Whether full blocks of 256 go through a randomised Hadamard transform.",
    .parse = [](const std::string& value,
                CodecSpec* spec) { return ParseFlag(value, &spec->hadamard); },
    .print = [](const CodecSpec& spec) -> std::string { return spec.hadamard ? "1" : "0"; }};

constexpr const ParameterInfo* kParameters[] = {&kBlock, &kRounding, &kHadamard, &kSeed};

absl::Status Check(const CodecSpec& spec) {
  if (!spec.hadamard || spec.block == kTransform) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("hadamard=1 transforms 256 elements at once, got block=", spec.block,
                   "; leave the block out"));
}

}  // namespace

const CodecInfo& Int4::Info() {
  static constexpr CodecInfo info = {.traits = kTraits,
                                     .help = "Four bits an element: the default.",
                                     .parameters = kParameters,
                                     .scalar = ReferenceOf<Int4>(),
                                     .simd = SimdBlocksOf<Int4>(),
                                     .check = Check};
  return info;
}

}  // namespace thinwire::codecs
