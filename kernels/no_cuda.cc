// CMake compiles this in place of load_cuda.cc if there is no CUDA toolkit.
#include "kernels/device.h"

namespace thinwire {

absl::StatusOr<const kernels::DeviceApi*> LoadCuda(const std::string&) {
  return absl::UnimplementedError(
      "this build has no CUDA part, because it was made without nvcc: keep gradients in host "
      "memory, or build where the CUDA toolkit is");
}

}  // namespace thinwire
