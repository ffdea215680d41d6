// Macros and bit casts that make element math one source for the CPU and for CUDA kernels.
#ifndef THINWIRE_COMPRESS_HD_H_
#define THINWIRE_COMPRESS_HD_H_

#include <cstdint>
#include <cstring>

// THINWIRE_UNROLL stands before a loop over an array that is to stay in registers.
#ifdef __CUDACC__
#define THINWIRE_HD __host__ __device__ __forceinline__
#else
#define THINWIRE_HD inline
#endif
#ifdef __CUDA_ARCH__
#define THINWIRE_UNROLL _Pragma("unroll")
#else
#define THINWIRE_UNROLL
#endif

namespace thinwire {

THINWIRE_HD uint32_t BitsOf(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

THINWIRE_HD float FloatOf(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

inline constexpr uint32_t kAbsMask = 0x7fffffffu;
inline constexpr uint32_t kInfBits = 0x7f800000u;

// By the bits, which no compiler's floating-point options change.
THINWIRE_HD bool IsFinite(float value) { return (BitsOf(value) & kAbsMask) < kInfBits; }

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_HD_H_
