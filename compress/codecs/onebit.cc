#include "compress/codecs/onebit.h"

#include "compress/codec_info.h"
#include "compress/codecs/int4.h"
#include "compress/codecs/reference.h"

namespace thinwire::codecs {
namespace {

constexpr const ParameterInfo* kParameters[] = {&kBlock};

// One bit of a mean loses what the ranks' bits have averaged to.
CodecSpec DefaultDown(const CodecSpec& up) { return {.id = Int4::kTraits.id, .block = up.block}; }

// One bit of a bare gradient, with error feedback, is noise of the gradient's own size.
MomentumNeed Momentum(const CodecSpec&) { return MomentumNeed::kRequired; }

}  // namespace

const CodecInfo& OneBit::Info() {
  static constexpr CodecInfo info = {
      .traits = kTraits,
      .help = "The sign of each element, int4 on the second hop: for very slow links.",
      .parameters = kParameters,
      .scalar = ReferenceOf<OneBit>(),
      .simd = SimdBlocksOf<OneBit>(),
      .default_down = DefaultDown,
      .momentum = Momentum};
  return info;
}

}  // namespace thinwire::codecs
