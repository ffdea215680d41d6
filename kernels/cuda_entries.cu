#include "kernels/cuda_launch.h"
#include "kernels/cuda_start.cuh"
#include "kernels/cuda_stream_memory.h"
#include "kernels/cuda_team.cuh"
#include "kernels/entry_adder.h"
#include "kernels/entry_encoder.h"

namespace thinwire::kernels {
namespace {

using Shared = EntryShared<DeviceTeam>;

__global__ void __launch_bounds__(kThreads)
    EntriesBeginKernel(const __grid_constant__ EncodeEntriesLaunch launch) {
  __shared__ DeviceTeam::Scratch scratch;
  __shared__ Shared shared;
  DeviceTeam team(scratch);
  EntryEncoder<DeviceTeam>(team, shared, launch).Begin();
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    EntriesScanKernel(const __grid_constant__ EncodeEntriesLaunch launch) {
  __shared__ DeviceTeam::Scratch scratch;
  __shared__ Shared shared;
  DeviceTeam team(scratch);
  EntryEncoder<DeviceTeam>(team, shared, launch).Scan(blockIdx.x);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    EntriesDigitKernel(const __grid_constant__ EncodeEntriesLaunch launch, unsigned digit) {
  __shared__ DeviceTeam::Scratch scratch;
  __shared__ Shared shared;
  DeviceTeam team(scratch);
  EntryEncoder<DeviceTeam>(team, shared, launch).CountDigits(blockIdx.x, digit);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    EntriesCountKernel(const __grid_constant__ EncodeEntriesLaunch launch) {
  __shared__ DeviceTeam::Scratch scratch;
  __shared__ Shared shared;
  DeviceTeam team(scratch);
  EntryEncoder<DeviceTeam>(team, shared, launch).Count(blockIdx.x);
}

__global__ void __launch_bounds__(kThreads, kFewBlocksPerMultiprocessor)
    EntriesSendKernel(const __grid_constant__ EncodeEntriesLaunch launch) {
  __shared__ DeviceTeam::Scratch scratch;
  __shared__ Shared shared;
  DeviceTeam team(scratch);
  EntryEncoder<DeviceTeam>(team, shared, launch).Send(blockIdx.x);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    EntriesAddKernel(const __grid_constant__ AddEntriesLaunch launch) {
  __shared__ DeviceTeam::Scratch scratch;
  __shared__ AdderShared<DeviceTeam> shared;
  DeviceTeam team(scratch);
  EntryAdder<DeviceTeam>(team, shared, launch, blockIdx.x).Run();
}

}  // namespace

cudaError_t LaunchEncodeEntries(const EncodeEntriesLaunch& given, cudaStream_t stream) {
  const StreamMemory memory(MemoryOf(given.room), RoomOf(given), stream);
  cudaError_t error = memory.error();
  EncodeEntriesLaunch launch = given;
  PutRoom(launch, memory.data());
  const auto start = [&](auto kernel, unsigned teams, auto... more) {
    if (error == cudaSuccess) error = Start(kernel, teams, kThreads, stream, launch, more...);
  };
  start(EntriesBeginKernel, launch.tiles == 0 ? 0 : 1);
  start(EntriesScanKernel, launch.tiles);
  for (unsigned digit = 0; digit < kDigits; ++digit) {
    start(EntriesDigitKernel, EntryTeams(launch.tiles), digit);
  }
  start(EntriesCountKernel, GroupsOf(launch.tiles));
  start(EntriesSendKernel, EntryTeams(launch.tiles));
  return error;
}

cudaError_t LaunchAddEntries(const AddEntriesLaunch& launch, cudaStream_t stream) {
  return Start(EntriesAddKernel, launch.tiles, kThreads, stream, launch);
}

}  // namespace thinwire::kernels
