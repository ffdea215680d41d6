// adaptive: the number of bits of a block depends on its size. compress/FORMAT.md, "adaptive".
// Bits by the logarithm of a block's size (reverse water-filling): Cover and Thomas, "Elements of
// Information Theory", section 10.3.3, and for gradients DynamiQ, arXiv 2602.08923. Levels of a
// Gaussian after a randomised Hadamard transform: EDEN, Vargaftik et al., arXiv 2108.08842.
#ifndef THINWIRE_COMPRESS_CODECS_ADAPTIVE_H_
#define THINWIRE_COMPRESS_CODECS_ADAPTIVE_H_

#include <cmath>
#include <cstddef>

#include "compress/codecs/onebit.h"
#include "compress/element_math.h"
#include "compress/types.h"

namespace thinwire {

struct CodecInfo;
struct CodecOperations;

// Heads.

inline constexpr uint32_t kSmallSquares = (127u - 60u) << 23;  // 2^-60
inline constexpr uint32_t kLargeSquares = (127u + 96u) << 23;  // 2^96
inline constexpr uint16_t kFirstHead = (127u - 100u) << 7;     // 2^-100
// From this head on a decoder's sums could overflow fp32: 256 levels of at most 4.7 each.
inline constexpr uint16_t kHugeHead = (127u + 116u) << 7;  // 2^116
inline constexpr uint16_t kFirstNonFiniteHead = 0x7f80;  // for decoders; an encoder sends kNanScale

// True if a block's sum of squares neither overflows nor vanishes. If not, the block is summed
// again, times SquaresFactor.
THINWIRE_HD bool SquaresAreInRange(float sum) {
  return BitsOf(sum) - kSmallSquares < kLargeSquares - kSmallSquares;
}
THINWIRE_HD float SquaresFactor(float sum) {
  return BitsOf(sum) < kSmallSquares ? 0x1p64f : 0x1p-80f;
}
THINWIRE_HD float Undo(float factor) { return factor > 1.0f ? 0x1p-64f : 0x1p80f; }

// The head of a block whose sum of squares, of elements times 1 / unit, is `sum`.
THINWIRE_HD uint16_t AdaptiveHead(float sum, float unit) {
  const float rms = sqrtf(sum * (1.0f / kTransform)) * unit;
  const uint32_t bits = BitsOf(rms);
  if (bits >= uint32_t{kHugeHead} << 16) return kNanScale;
  return bits < uint32_t{kFirstHead} << 16 ? 0 : ToBf16(rms);
}

// Widths.

inline constexpr int kMaxWidth = 8;
inline constexpr int kLowestThreshold = 1 - 128 * kMaxWidth;   // all nonzero heads get kMaxWidth
inline constexpr int kHighestThreshold = kFirstNonFiniteHead;  // none gets more than the floor
inline constexpr size_t kPlaneBytes = kTransform / 8;          // one bit of each code of a block

// True if the block of this head has codes.
THINWIRE_HD bool HasCodes(uint16_t head) { return head != 0 && head < kFirstNonFiniteHead; }

// Heads have seven bits of fraction: a step of 128 is a factor of two.
THINWIRE_HD int AdaptiveWidth(uint16_t head, int threshold, int floor) {
  if (!HasCodes(head)) return 0;
  const int width = (static_cast<int>(head) - threshold) >> 7;
  return width < floor ? floor : width > kMaxWidth ? kMaxWidth : width;
}

// Bit planes of all blocks together, for `sixteenths` / 16 bits per element.
THINWIRE_HD size_t AdaptivePlanes(uint32_t sixteenths, size_t blocks) {
  return (blocks * sixteenths + 15) / 16;
}

// Codes.

// The encoder's integer unit: a head is 126 of them, so that sums of 256 elements fit in 16 bits.
inline constexpr int kHeadUnits = 126;
// The widest codes for which sums of 256 levels fit in 16 bits.
inline constexpr int kNarrowWidth = 5;
THINWIRE_HD constexpr int LevelUnits(int width) { return width <= kNarrowWidth ? 32 : 256; }

// Elements times this are the encoder's integers; the other factor, 1/16, is in the signs.
THINWIRE_HD float AdaptiveInverse(float head) { return 16.0f * (kHeadUnits / head); }
// Sums of levels times this, and a sign, are elements.
THINWIRE_HD float AdaptiveStep(float head, int width) {
  return head / static_cast<float>(LevelUnits(width));
}

// Half-way between two levels, in sixteenths of the encoder's integers.
THINWIRE_HD constexpr int HalfWay(int level, int next, int width) {
  return (level + next) * (8 * kHeadUnits) / LevelUnits(width);
}

namespace codecs {

struct Adaptive {
  static constexpr CodecTraits kTraits{
      .id = CodecId{6}, .name = "adaptive", .kind = CodecKind::kWidths, .code_bits = 2};
  static const CodecInfo& Info();

  static const CodecOperations kReference;  // the normative scalar operations
  static const CodecOperations kSimd;       // the loops for the best instruction set of this CPU
};

}  // namespace codecs
}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODECS_ADAPTIVE_H_
