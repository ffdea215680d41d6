#include "compress/codecs/int8.h"

#include "compress/codec_info.h"
#include "compress/codecs/reference.h"

namespace thinwire::codecs {
namespace {

constexpr const ParameterInfo* kParameters[] = {&kBlock, &kRounding, &kSeed};

}  // namespace

const CodecInfo& Int8::Info() {
  static constexpr CodecInfo info = {.traits = kTraits,
                                     .help = "Eight bits an element: safe everywhere.",
                                     .parameters = kParameters,
                                     .scalar = ReferenceOf<Int8>(),
                                     .simd = SimdBlocksOf<Int8>()};
  return info;
}

}  // namespace thinwire::codecs
