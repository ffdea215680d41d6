// Start: one kernel on a stream, or its code loaded.
#ifndef THINWIRE_KERNELS_CUDA_START_CUH_
#define THINWIRE_KERNELS_CUDA_START_CUH_

#include <cuda_runtime_api.h>

namespace thinwire::kernels {

// Queues the kernel. Without teams it runs nothing, and loads the kernel's code into the device's
// context. CUDA loads code at the first launch otherwise, which may wait for kernels that run, and
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
