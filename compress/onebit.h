// The element math of onebit: compress/FORMAT.md, "onebit".
// Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
// Training of Speech DNNs", Interspeech 2014, section 3; the scale is that of Karimireddy et al.,
// arXiv 1901.09847, algorithm 1.
#ifndef THINWIRE_COMPRESS_ONEBIT_H_
#define THINWIRE_COMPRESS_ONEBIT_H_

#include <cstddef>

#include "compress/half_float.h"
#include "compress/quantiser.h"

namespace thinwire {

// A block's |x| are summed over this many lanes: lane l adds elements l, l + 32, ... in order.
inline constexpr size_t kSumLanes = 32;

// Folds 16, 8, 4, 2, 1; destroys `lanes`.
THINWIRE_HD float FoldLanes(float* lanes) {
  for (size_t width = kSumLanes / 2; width > 0; width /= 2) {
    for (size_t l = 0; l < width; ++l) lanes[l] = lanes[l] + lanes[l + width];
  }
  return lanes[0];
}

// What stands for a block's magnitude in KindOf: a sum that overflows is an Inf, as a lone Inf is.
THINWIRE_HD float MeanOf(float sum, size_t count) { return sum / static_cast<float>(count); }

THINWIRE_HD float OneBitScale(float mean) { return FromBf16(ToBf16(mean)); }

// The scale with the sign of x; a block's bit is that sign.
THINWIRE_HD float SignedScale(bool negative, float scale) { return negative ? -scale : scale; }

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_ONEBIT_H_
