#include "compress/codecs/onebit.h"

#include "compress/codec_info.h"
#include "compress/codecs/int4.h"
#include "compress/codecs/reference.h"

namespace thinwire::codecs {
namespace {

constexpr const ParameterInfo* kParameters[] = {&kBlock};

// Encoding a mean in one bit would lose the levels that the ranks' bits average to.
CodecSpec DefaultDown(const CodecSpec& up) { return {.id = Int4::kTraits.id, .block = up.block}; }

// One bit of a bare gradient, with error feedback, is noise as large as the gradient.
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
