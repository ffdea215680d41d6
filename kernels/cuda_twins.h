// Twins of the kernels, for kernel_bench: they move the same bytes and do nothing else.
#ifndef THINWIRE_KERNELS_CUDA_TWINS_H_
#define THINWIRE_KERNELS_CUDA_TWINS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace thinwire::kernels {

// Device memory of `numel` elements, a multiple of 32, aligned to 16 bytes; null is not accessed.
struct TwinArgs {
  const float* gradient;  // read
  float* floats;          // written; read before, if `add`
  bool add;
  const uint8_t* codes_in;  // read: bits / 8 bytes per element
  uint8_t* codes_out;       // written
  int bits;                 // 32, 16, 8, 4, 2 or 1
  size_t numel;
};

cudaError_t LaunchTwin(const TwinArgs& args, cudaStream_t stream);

// Reads device memory that holds zeros, so that the L2 cache holds only data that need not be
// written back.
cudaError_t LaunchRead(const void* zeros, size_t bytes, cudaStream_t stream);

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_CUDA_TWINS_H_
