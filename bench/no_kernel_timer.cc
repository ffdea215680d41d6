// Taken by CMake in place of cuda_kernel_timer.cc where there is no CUDA toolkit.
#include "bench/kernel_timer.h"

namespace thinwire {

absl::StatusOr<std::unique_ptr<KernelTimer>> MakeKernelTimer() {
  return absl::UnimplementedError("this build was made without nvcc");
}

}  // namespace thinwire
