// StreamMemory: device memory through which the kernels of one operation pass data to the next.
#ifndef THINWIRE_KERNELS_CUDA_STREAM_MEMORY_H_
#define THINWIRE_KERNELS_CUDA_STREAM_MEMORY_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace thinwire::kernels {

// Memory of the current device, for work queued on the stream within the scope. Nothing waits: the
// next user of the memory, on any stream, runs after that work. In a stream that is being captured
// it becomes part of the graph.
class StreamMemory {
 public:
  // `given`: memory to use instead of `bytes` bytes from the pool; null: none.
  StreamMemory(uint8_t* given, size_t bytes, cudaStream_t stream);
  ~StreamMemory();
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;

  cudaError_t error() const { return error_; }
  uint8_t* data() const { return given_ != nullptr ? given_ : static_cast<uint8_t*>(own_); }

 private:
  uint8_t* const given_;
  const cudaStream_t stream_;
  void* own_ = nullptr;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_CUDA_STREAM_MEMORY_H_
