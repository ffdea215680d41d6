#include "kernels/cuda_launch.h"
#include "kernels/cuda_stream_memory.h"
#include "kernels/reduce_parts.h"

namespace thinwire::kernels {
namespace {

// Keeps the first error; nothing is launched after it.
struct Launcher {
  void operator()(const EncodeLaunch& launch) { Keep(launch, LaunchEncode); }
  void operator()(const DecodeLaunch& launch) { Keep(launch, LaunchDecode); }
  void operator()(const ReduceLaunch& launch) { Keep(launch, LaunchReduce); }

  template <typename Launch>
  void Keep(const Launch& launch, cudaError_t (*start)(const Launch&, cudaStream_t)) {
    if (error == cudaSuccess) error = start(launch, stream);
  }

  const cudaStream_t stream;
  cudaError_t error;
};

}  // namespace

cudaError_t LaunchReduceInParts(const ReduceLaunch& launch, cudaStream_t stream) {
  const StreamMemory memory(launch.room, RoomOf(launch), stream);
  Launcher launcher{stream, memory.error()};
  ReduceInParts(launch, memory.data(), launcher);
  return launcher.error;
}

}  // namespace thinwire::kernels
