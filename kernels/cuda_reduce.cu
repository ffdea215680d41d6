#include "kernels/cuda_launch.h"
#include "kernels/cuda_start.cuh"
#include "kernels/cuda_team.cuh"
#include "kernels/dispatch.h"
#include "kernels/reduce_parts.h"
#include "kernels/tile_reducer.h"

namespace thinwire::kernels {
namespace {

template <typename Up, typename Down, DType kDType>
__global__ void __launch_bounds__(kThreads, kReduceBlocksPerMultiprocessor)
    ReduceKernel(const __grid_constant__ ReduceLaunch launch) {
  __shared__ DeviceTeam::Scratch scratch;
  __shared__ ReduceShared<DeviceTeam, Up, Down> shared;
  DeviceTeam team(scratch);
  ReduceTile<DeviceTeam, Up, Down, kDType>(team, shared, launch, blockIdx.x);
}

}  // namespace

cudaError_t LaunchReduce(const ReduceLaunch& launch, cudaStream_t stream) {
  if (IsInParts(launch)) return LaunchReduceInParts(launch, stream);
  return ForReduction(launch, [&](auto up, auto down, auto dtype) {
    return Start(ReduceKernel<decltype(up), decltype(down), dtype()>, launch.tiles, launch.threads,
                 stream, launch);
  });
}

}  // namespace thinwire::kernels
