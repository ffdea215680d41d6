// onebit: the sign of each element and the mean |x| of each block. compress/FORMAT.md, "onebit".
// Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
// Training of Speech DNNs", Interspeech 2014, section 3; the scale is that of Karimireddy et al.,
// arXiv 1901.09847, algorithm 1.
#ifndef THINWIRE_COMPRESS_CODECS_ONEBIT_H_
#define THINWIRE_COMPRESS_CODECS_ONEBIT_H_

#include <cstddef>

#include "compress/element_math.h"
#include "compress/types.h"

namespace thinwire {

struct CodecInfo;

// A block's |x| are summed over this many lanes: lane l adds elements l, l + 32, ... in order.
inline constexpr size_t kSumLanes = 32;

// Folds 16, 8, 4, 2, 1; destroys `lanes`.
THINWIRE_HD float FoldLanes(float* lanes) {
  for (size_t width = kSumLanes / 2; width > 0; width /= 2) {
    for (size_t l = 0; l < width; ++l) lanes[l] = lanes[l] + lanes[l + width];
  }
  return lanes[0];
}

// KindOf takes the mean as the block's magnitude. A sum that overflows is Inf, as with an element
// that is Inf.
THINWIRE_HD float MeanOf(float sum, size_t count) { return sum / static_cast<float>(count); }

THINWIRE_HD float OneBitScale(float mean) { return FromBf16(ToBf16(mean)); }

namespace codecs {

struct OneBit {
  static constexpr CodecTraits kTraits{
      .id = CodecId{4}, .name = "onebit", .kind = CodecKind::kBlocks, .code_bits = 1, .qmax = 1};
  static const CodecInfo& Info();

  // The members of Quantiser<> (compress/element_math.h), which documents them.
  static constexpr bool kMean = true;
  static constexpr int kTinyCode = 1;
  static constexpr bool kStochastic = false;
  static constexpr bool kTransforms = false;
  THINWIRE_HD static float PlainScale(uint32_t magnitude) {
    return OneBitScale(FloatOf(magnitude));
  }
  THINWIRE_HD static int CodeFor(float x, float) { return BitsOf(x) >> 31 ? -1 : 1; }
};

}  // namespace codecs
}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODECS_ONEBIT_H_
