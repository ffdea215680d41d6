#include "kernels/cuda_twins.h"
#include "kernels/tile.h"
#include "kernels/word.h"

namespace thinwire::kernels {
namespace {

struct alignas(16) Quad {
  float v[kQuad];
};

// Codes of a quad: as many bytes as the codec has; for onebit, four bytes of every eighth thread.
template <int kBits>
__device__ __forceinline__ uint32_t ReadCodes(const uint8_t* codes, size_t quad) {
  constexpr unsigned kBytes = kBits >= 2 ? kBits * kQuad / 8 : 1;
  alignas(16) uint32_t words[4] = {};
  CopyWord<kBytes>(words, codes + quad * kQuad * kBits / 8);
  return words[0] ^ words[1] ^ words[2] ^ words[3];
}

template <int kBits>
__device__ __forceinline__ void WriteCodes(uint8_t* codes, size_t quad, uint32_t value) {
  constexpr unsigned kBytes = kBits >= 2 ? kBits * kQuad / 8 : 4;
  if (kBits == 1 && quad % 8 != 0) return;
  alignas(16) const uint32_t words[4] = {value, value, value, value};
  CopyWord<kBytes>(codes + quad * kQuad * kBits / 8, words);
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
      // The sum of all four keeps the compiler from leaving out a load.
      const float all = sum.v[0] + sum.v[1] + sum.v[2] + sum.v[3];
      WriteCodes<kBits>(args.codes_out, place / kQuad, __float_as_uint(all));
    }
  }
}

}  // namespace

cudaError_t LaunchTwin(const TwinArgs& args, cudaStream_t stream) {
  const unsigned tiles = static_cast<unsigned>((args.numel + kTile - 1) / kTile);
  switch (args.bits) {
    case 32: TwinKernel<32><<<tiles, kThreads, 0, stream>>>(args); break;
    case 16: TwinKernel<16><<<tiles, kThreads, 0, stream>>>(args); break;
    case 8: TwinKernel<8><<<tiles, kThreads, 0, stream>>>(args); break;
    case 4: TwinKernel<4><<<tiles, kThreads, 0, stream>>>(args); break;
    default: TwinKernel<1><<<tiles, kThreads, 0, stream>>>(args); break;
  }
  return cudaGetLastError();
}

}  // namespace thinwire::kernels
