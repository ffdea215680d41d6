#include "kernels/cuda_launch.h"
#include "kernels/cuda_team.cuh"
#include "kernels/cuda_widths.h"
#include "kernels/dispatch.h"
#include "kernels/tiles.h"

namespace thinwire::kernels {
namespace {

template <typename Down, DType kDType>
__global__ void __launch_bounds__(kThreads, kReduceBlocksPerMultiprocessor)
    ReduceKernel(const __grid_constant__ ReduceLaunch launch) {
  __shared__ DeviceTeam::Scratch scratch;
  __shared__ EncoderShared<DeviceTeam, Down> shared;
  DeviceTeam team(scratch);
  ReduceTile<DeviceTeam, Down, kDType>(team, shared, launch, blockIdx.x);
}

}  // namespace

cudaError_t LaunchReduce(const ReduceLaunch& launch, cudaStream_t stream) {
  if (HasWidths(launch.up) || HasWidths(launch.down)) return LaunchReduceWidths(launch, stream);
  return ForCodec(launch.down, [&](auto down) {
    return ForDType(launch.dtype, [&](auto dtype) {
      ReduceKernel<decltype(down), dtype()><<<launch.tiles, kThreads, 0, stream>>>(launch);
      return cudaGetLastError();
    });
  });
}

}  // namespace thinwire::kernels
