#include "kernels/cuda_launch.h"
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
      DecodeKernel<Traits, DType::kF32, true><<<tiles, threads, 0, stream>>>(launch);
      return cudaGetLastError();
    }
    return ForDType(launch.dtype, [&](auto dtype) {
      DecodeKernel<Traits, dtype(), false><<<tiles, threads, 0, stream>>>(launch);
      return cudaGetLastError();
    });
  });
}

cudaError_t LaunchAccumulate(const AccumulateLaunch& launch, cudaStream_t stream) {
  return ForDType(launch.dtype, [&](auto dtype) {
    AccumulateKernel<dtype()><<<launch.jobs.tiles, launch.jobs.threads, 0, stream>>>(launch);
    return cudaGetLastError();
  });
}

cudaError_t LaunchEndMomentum(const MomentumLaunch& launch, cudaStream_t stream) {
  EndMomentumKernel<<<launch.jobs.tiles, launch.jobs.threads, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace thinwire::kernels
