// The element math of topk: compress/FORMAT.md, "topk". The k largest of n, exactly.
// Top-K with error feedback: Aji and Heafield, "Sparse Communication for Distributed Gradient
// Descent", arXiv 1704.05021; Stich et al., "Sparsified SGD with Memory", arXiv 1809.07599.
#ifndef THINWIRE_COMPRESS_TOPK_H_
#define THINWIRE_COMPRESS_TOPK_H_

#include <cstddef>

#include "compress/codec_spec.h"
#include "compress/half_float.h"
#include "compress/quantiser.h"

namespace thinwire {

// An entry's index counts within its sub-block, so that 16 bits hold it.
inline constexpr size_t kSubBlock = 65536;

// k: at least one of an element that is there at all.
inline size_t EntryCount(const CodecSpec& spec, size_t numel) {
  const size_t wanted = (numel * spec.density_ppm + 999999) / 1000000;
  return numel == 0 ? 0 : wanted == 0 ? 1 : wanted;
}

// What elements are ordered by: the magnitude's bits, so that a NaN is larger than everything.
THINWIRE_HD uint32_t SelectionKey(float x) { return BitsOf(x) & kAbsMask; }

// An x that is not finite is sent as it is and leaves its residual as it was.
THINWIRE_HD bool StoresResidual(float x) { return SelectionKey(x) < kHugeBits; }

// index in the low half, the value as bf16 in the high one.
THINWIRE_HD uint32_t EntryOf(float x, size_t index) {
  return static_cast<uint32_t>(ToBf16(x)) << 16 | static_cast<uint32_t>(index % kSubBlock);
}
THINWIRE_HD float EntryValue(uint32_t entry) { return FloatOf(entry & 0xffff0000u); }
THINWIRE_HD size_t EntryIndex(uint32_t entry) { return entry & 0xffffu; }

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_TOPK_H_
