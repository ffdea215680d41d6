#include "kernels/cuda_twins.h"
#include "kernels/tile.h"

namespace thinwire::kernels {
namespace {

struct alignas(16) Quad {
  float v[kQuad];
};

// The codes of a quad as one load or store. An array that is filled through its address would be in
// local memory, which would slow the twin down.
template <int kBits>
struct QuadCodes;
template <>
struct QuadCodes<1> {
  using Type = uint8_t;  // for two quads
};
template <>
struct QuadCodes<2> {
  using Type = uint8_t;
};
template <>
struct QuadCodes<4> {
  using Type = uint16_t;
};
template <>
struct QuadCodes<8> {
  using Type = uint32_t;
};
template <>
struct QuadCodes<16> {
  using Type = uint2;
};
template <>
struct QuadCodes<32> {
  using Type = uint4;
};

__device__ __forceinline__ uint32_t Fold(uint32_t codes) { return codes; }
__device__ __forceinline__ uint32_t Fold(uint2 codes) { return codes.x ^ codes.y; }
__device__ __forceinline__ uint32_t Fold(uint4 codes) {
  return codes.x ^ codes.y ^ codes.z ^ codes.w;
}

template <int kBits>
__device__ __forceinline__ uint32_t ReadCodes(const uint8_t* codes, size_t quad) {
  using Codes = typename QuadCodes<kBits>::Type;
  return Fold(*reinterpret_cast<const Codes*>(codes + quad * kQuad * kBits / 8));
}

// onebit's codes are words of eight quads, which one thread writes.
template <int kBits>
__device__ __forceinline__ void WriteCodes(uint8_t* codes, size_t quad, uint32_t value) {
  if constexpr (kBits == 1) {
    if (quad % 8 == 0) *reinterpret_cast<uint32_t*>(codes + quad / 2) = value;
  } else if constexpr (kBits <= 8) {
    using Codes = typename QuadCodes<kBits>::Type;
    *reinterpret_cast<Codes*>(codes + quad * kQuad * kBits / 8) = static_cast<Codes>(value);
  } else if constexpr (kBits == 16) {
    reinterpret_cast<uint2*>(codes)[quad] = make_uint2(value, value);
  } else {
    reinterpret_cast<uint4*>(codes)[quad] = make_uint4(value, value, value, value);
  }
}

template <int kBits>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    TwinKernel(const __grid_constant__ TwinArgs args) {
#pragma unroll
  for (unsigned q = 0; q < kQuads; ++q) {
    const size_t place = size_t{blockIdx.x} * kTile + PlaceOf(threadIdx.x, q);
    if (place >= args.numel) return;
    Quad sum = {};
    if (args.gradient != nullptr) sum = *reinterpret_cast<const Quad*>(args.gradient + place);
    if (args.add) {
      const Quad before = *reinterpret_cast<const Quad*>(args.floats + place);
      for (unsigned i = 0; i < kQuad; ++i) sum.v[i] += before.v[i];
    }
    if (args.codes_in != nullptr) {
      sum.v[0] += __uint_as_float(ReadCodes<kBits>(args.codes_in, place / kQuad));
    }
    if (args.floats != nullptr) *reinterpret_cast<Quad*>(args.floats + place) = sum;
    if (args.codes_out != nullptr) {
      // The sum of all four keeps the compiler from omitting a load.
      const float all = sum.v[0] + sum.v[1] + sum.v[2] + sum.v[3];
      WriteCodes<kBits>(args.codes_out, place / kQuad, __float_as_uint(all));
    }
  }
}

// Nothing is written if everything is zero, but the compiler can't know that.
__global__ void ReadKernel(const uint4* memory, size_t count, uint32_t* never) {
  uint32_t sum = 0;
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    sum |= Fold(memory[i]);
  }
  if (sum != 0) *never = sum;
}

}  // namespace

cudaError_t LaunchRead(const void* zeros, size_t bytes, cudaStream_t stream) {
  constexpr unsigned kBlocks = 1024;
  ReadKernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<const uint4*>(zeros),
                                               bytes / sizeof(uint4), nullptr);
  return cudaGetLastError();
}

cudaError_t LaunchTwin(const TwinArgs& args, cudaStream_t stream) {
  const unsigned tiles = static_cast<unsigned>((args.numel + kTile - 1) / kTile);
  switch (args.bits) {
    case 32: TwinKernel<32><<<tiles, kThreads, 0, stream>>>(args); break;
    case 16: TwinKernel<16><<<tiles, kThreads, 0, stream>>>(args); break;
    case 8: TwinKernel<8><<<tiles, kThreads, 0, stream>>>(args); break;
    case 4: TwinKernel<4><<<tiles, kThreads, 0, stream>>>(args); break;
    case 2: TwinKernel<2><<<tiles, kThreads, 0, stream>>>(args); break;
    default: TwinKernel<1><<<tiles, kThreads, 0, stream>>>(args); break;
  }
  return cudaGetLastError();
}

}  // namespace thinwire::kernels
