// Start: runs one kernel on a stream, or loads its code.
#ifndef THINWIRE_KERNELS_CUDA_START_CUH_
#define THINWIRE_KERNELS_CUDA_START_CUH_

#include <cuda_runtime_api.h>

namespace thinwire::kernels {

// Queues the kernel. With 0 teams it runs nothing but loads the kernel's code into the device's
// context. Otherwise CUDA loads code at the first launch, which may wait for running kernels, and
// so for peers ("Lazy Loading" in the CUDA C++ Programming Guide).
template <typename... Parameters, typename... Arguments>
cudaError_t Start(void (*kernel)(Parameters...), unsigned teams, unsigned threads,
                  cudaStream_t stream, const Arguments&... arguments) {
  if (teams == 0) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, kernel);
  }
  kernel<<<teams, threads, 0, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_CUDA_START_CUH_
