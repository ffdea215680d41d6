#include "kernels/cuda_launch.h"
#include "kernels/cuda_start.cuh"
#include "kernels/cuda_team.cuh"
#include "kernels/cuda_widths.h"
#include "kernels/dispatch.h"
#include "kernels/tiles.h"

namespace thinwire::kernels {
namespace {

template <typename Traits, DType kDType>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    EncodeKernel(const __grid_constant__ EncodeLaunch launch) {
  __shared__ DeviceTeam::Scratch scratch;
  __shared__ EncoderShared<DeviceTeam, Traits> shared;
  DeviceTeam team(scratch);
  EncodeTile<DeviceTeam, Traits, kDType>(team, shared, launch, blockIdx.x);
}

}  // namespace

cudaError_t LaunchEncode(const EncodeLaunch& launch, cudaStream_t stream) {
  if (HasWidths(launch.codec)) return LaunchEncodeWidths(launch, stream);
  return ForCodec(launch.codec, [&](auto traits) {
    return ForDType(launch.dtype, [&](auto dtype) {
      return Start(EncodeKernel<decltype(traits), dtype()>, launch.jobs.tiles, launch.jobs.threads,
                   stream, launch);
    });
  });
}

}  // namespace thinwire::kernels
