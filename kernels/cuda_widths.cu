#include "kernels/cuda_start.cuh"
#include "kernels/cuda_stream_memory.h"
#include "kernels/cuda_team.cuh"
#include "kernels/cuda_widths.h"
#include "kernels/dispatch.h"
#include "kernels/widths_plan.h"
#include "kernels/widths_tiles.h"

namespace thinwire::kernels {
namespace {

__global__ void __launch_bounds__(kThreads)
    PlanKernel(const __grid_constant__ PlanLaunch launch, WidthsPlan* plans) {
  __shared__ DeviceTeam::Scratch scratch;
  __shared__ PlanShared<DeviceTeam> shared;
  DeviceTeam team(scratch);
  PlanShard(team, shared, launch, plans, blockIdx.x);
}

template <DType kDType>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    EncodeHeadsKernel(const __grid_constant__ EncodeLaunch launch) {
  __shared__ DeviceTeam::Scratch scratch;
  __shared__ HeadsShared<DeviceTeam> shared;
  DeviceTeam team(scratch);
  EncodeHeadsTile<DeviceTeam, kDType>(team, shared, launch, blockIdx.x);
}

// Needs more registers than the others: it holds x, and transforms forward and back.
template <DType kDType>
__global__ void __launch_bounds__(kThreads, kFewBlocksPerMultiprocessor)
    EncodeCodesKernel(const __grid_constant__ EncodeLaunch launch, const WidthsPlan* plans) {
  __shared__ DeviceTeam::Scratch scratch;
  DeviceTeam team(scratch);
  EncodeCodesTile<DeviceTeam, kDType>(team, launch, plans, blockIdx.x);
}

template <DType kDType, bool kAdd>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    DecodeWidthsKernel(const __grid_constant__ DecodeLaunch launch, const WidthsPlan* plans) {
  __shared__ DeviceTeam::Scratch scratch;
  DeviceTeam team(scratch);
  DecodeWidthsTile<DeviceTeam, kDType, kAdd>(team, launch, plans, blockIdx.x);
}

// The plans of a launch's shards, made on its stream.
class StreamPlans {
 public:
  template <typename Launch>
  StreamPlans(const Launch& launch, cudaStream_t stream)
      : memory_(launch.room, RoomOf(launch), stream), error_(memory_.error()) {
    const unsigned shards = launch.jobs.tiles == 0 ? 0 : launch.jobs.count;
    if (error_ == cudaSuccess) {
      error_ = Start(PlanKernel, shards, kThreads, stream, PlansOf(launch), data());
    }
  }

  cudaError_t error() const { return error_; }
  WidthsPlan* data() const { return reinterpret_cast<WidthsPlan*>(memory_.data()); }

 private:
  const StreamMemory memory_;
  cudaError_t error_;
};

}  // namespace

cudaError_t LaunchEncodeWidths(const EncodeLaunch& launch, cudaStream_t stream) {
  return ForDType(launch.dtype, [&](auto dtype) {
    const unsigned tiles = launch.jobs.tiles;
    const cudaError_t heads = Start(EncodeHeadsKernel<dtype()>, tiles, kThreads, stream, launch);
    if (heads != cudaSuccess) return heads;
    const StreamPlans plans(launch, stream);
    if (plans.error() != cudaSuccess) return plans.error();
    return Start(EncodeCodesKernel<dtype()>, tiles, kThreads, stream, launch, plans.data());
  });
}

cudaError_t LaunchDecodeWidths(const DecodeLaunch& launch, cudaStream_t stream) {
  const unsigned tiles = launch.jobs.tiles;
  const StreamPlans plans(launch, stream);
  if (plans.error() != cudaSuccess) return plans.error();
  if (launch.add) {
    return Start(DecodeWidthsKernel<DType::kF32, true>, tiles, kThreads, stream, launch,
                 plans.data());
  }
  return ForDType(launch.dtype, [&](auto dtype) {
    return Start(DecodeWidthsKernel<dtype(), false>, tiles, kThreads, stream, launch, plans.data());
  });
}

}  // namespace thinwire::kernels
