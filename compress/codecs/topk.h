// topk: the k largest of n elements, exactly. compress/FORMAT.md, "topk".
// Top-K with error feedback: Aji and Heafield, "Sparse Communication for Distributed Gradient
// Descent", arXiv 1704.05021; Stich et al., "Sparsified SGD with Memory", arXiv 1809.07599.
#ifndef THINWIRE_COMPRESS_CODECS_TOPK_H_
#define THINWIRE_COMPRESS_CODECS_TOPK_H_

#include <cstddef>

#include "compress/element_math.h"
#include "compress/types.h"

namespace thinwire {

struct CodecInfo;
struct CodecSpec;
struct EncodeArgs;

// An entry's index counts within its sub-block, so that 16 bits hold it.
inline constexpr size_t kSubBlock = 65536;

// k, for a density in millionths: at least one unless there are no elements.
inline size_t EntryCount(uint32_t density_ppm, size_t numel) {
  const size_t wanted = (numel * density_ppm + 999999) / 1000000;
  return numel == 0 ? 0 : wanted == 0 ? 1 : wanted;
}

// Elements are ordered by the bits of their magnitude, so a NaN is larger than everything else.
THINWIRE_HD uint32_t SelectionKey(float x) { return BitsOf(x) & kAbsMask; }

// The next step's search starts from this fraction of the k-th magnitude. With feedback many
// elements wait just below it, so a smaller fraction finds many more candidates (decision 10); from
// step to step the magnitude changes by less than this.
inline constexpr float kCarry = 63.0f / 64;

// The key to start from, given the last step's k-th magnitude, or 0 if there was none.
THINWIRE_HD uint32_t CarriedKey(float threshold) { return BitsOf(threshold * kCarry); }

// If x is not finite it is sent as it is and the residual is unchanged.
THINWIRE_HD bool StoresResidual(float x) { return SelectionKey(x) < kHugeBits; }

// An entry has the index in its low half and the value as bf16 in the high one.
THINWIRE_HD uint32_t EntryOf(float x, size_t index) {
  return static_cast<uint32_t>(ToBf16(x)) << 16 | static_cast<uint32_t>(index % kSubBlock);
}
THINWIRE_HD float EntryValue(uint32_t entry) { return FloatOf(entry & 0xffff0000u); }
THINWIRE_HD size_t EntryIndex(uint32_t entry) { return entry & 0xffffu; }

namespace codecs {

struct TopK {
  static constexpr CodecTraits kTraits{
      .id = CodecId{5}, .name = "topk", .kind = CodecKind::kEntries, .code_bits = 32};
  static const CodecInfo& Info();

  // On the CPU: finds the exact k largest in one pass over the data while last step's threshold
  // holds. Like Backend::EncodeAll of a shard of at least one element; writes the whole wire except
  // its padding.
  static void Encode(const CodecSpec& spec, const EncodeArgs& args);
};

}  // namespace codecs
}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODECS_TOPK_H_
