// Taken by CMake in place of load_cuda.cc where there is no CUDA toolkit.
#include "kernels/device.h"

namespace thinwire {

absl::StatusOr<const kernels::DeviceApi*> LoadCuda(const std::string&) {
  return absl::UnimplementedError(
      "this build has no CUDA part, because it was made without nvcc: keep gradients in host "
      "memory, or build where the CUDA toolkit is");
}

}  // namespace thinwire
