#include "kernels/cuda_launch.h"
#include "kernels/cuda_start.cuh"
#include "kernels/cuda_team.cuh"
#include "kernels/cuda_widths.h"
#include "kernels/dispatch.h"
#include "kernels/tiles.h"

namespace thinwire::kernels {
namespace {

template <typename Traits, DType kDType, bool kAdd>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    DecodeKernel(const __grid_constant__ DecodeLaunch launch) {
  __shared__ DeviceTeam::Scratch scratch;
  DeviceTeam team(scratch);
  DecodeTile<DeviceTeam, Traits, kDType, kAdd>(team, launch, blockIdx.x);
}

template <DType kDType>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    AccumulateKernel(const __grid_constant__ AccumulateLaunch launch) {
  __shared__ DeviceTeam::Scratch scratch;
  DeviceTeam team(scratch);
  AccumulateTile<DeviceTeam, kDType>(team, launch, blockIdx.x);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    EndMomentumKernel(const __grid_constant__ MomentumLaunch launch) {
  __shared__ DeviceTeam::Scratch scratch;
  DeviceTeam team(scratch);
  EndMomentumTile(team, launch, blockIdx.x);
}

}  // namespace

cudaError_t LaunchDecode(const DecodeLaunch& launch, cudaStream_t stream) {
  if (HasWidths(launch.codec)) return LaunchDecodeWidths(launch, stream);
  const unsigned tiles = launch.jobs.tiles, threads = launch.jobs.threads;
  return ForCodec(launch.codec, [&](auto traits) {
    using Traits = decltype(traits);
    if (launch.add) {
      return Start(DecodeKernel<Traits, DType::kF32, true>, tiles, threads, stream, launch);
    }
    return ForDType(launch.dtype, [&](auto dtype) {
      return Start(DecodeKernel<Traits, dtype(), false>, tiles, threads, stream, launch);
    });
  });
}

cudaError_t LaunchAccumulate(const AccumulateLaunch& launch, cudaStream_t stream) {
  return ForDType(launch.dtype, [&](auto dtype) {
    return Start(AccumulateKernel<dtype()>, launch.jobs.tiles, launch.jobs.threads, stream, launch);
  });
}

cudaError_t LaunchEndMomentum(const MomentumLaunch& launch, cudaStream_t stream) {
  return Start(EndMomentumKernel, launch.jobs.tiles, launch.jobs.threads, stream, launch);
}

}  // namespace thinwire::kernels
