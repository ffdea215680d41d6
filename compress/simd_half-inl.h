// Vectors of fp32 to bf16 and back. Included once for each target.
#if defined(THINWIRE_COMPRESS_SIMD_HALF_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_SIMD_HALF_INL_H_
#undef THINWIRE_COMPRESS_SIMD_HALF_INL_H_
#else
#define THINWIRE_COMPRESS_SIMD_HALF_INL_H_
#endif

#include <hwy/highway.h>

#include "compress/quantiser.h"
#include "compress/simd_pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Du16 = hn::Rebind<uint16_t, F>;

HWY_INLINE V LoadBf16(const uint8_t* at) {
  const auto half = hn::LoadU(Du16(), reinterpret_cast<const uint16_t*>(at));
  return hn::BitCast(F(), hn::ShiftLeft<16>(hn::PromoteTo(U(), half)));
}

// Rounds x half to even, and returns what a reader gets.
HWY_INLINE V StoreBf16(V x, uint8_t* at) {
  const auto half = Bf16Bits(x);
  // DemoteTo saturates from signed values, and these lie within 0..65535.
  hn::StoreU(hn::DemoteTo(Du16(), hn::BitCast(I(), half)), Du16(), reinterpret_cast<uint16_t*>(at));
  return hn::BitCast(F(), hn::ShiftLeft<16>(half));
}

// The new residual: the loss, or the old one where that is not finite.
HWY_INLINE V Bf16Loss(V x, V decoded, V old) {
  const V kept = hn::Sub(x, decoded);
  const auto finite = hn::Lt(hn::Abs(kept), hn::BitCast(F(), hn::Set(U(), kInfBits)));
  return hn::IfThenElse(finite, kept, old);
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_SIMD_HALF_INL_H_
