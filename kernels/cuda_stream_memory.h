// StreamMemory: device memory in which the kernels of one operation leave something for the next.
#ifndef THINWIRE_KERNELS_CUDA_STREAM_MEMORY_H_
#define THINWIRE_KERNELS_CUDA_STREAM_MEMORY_H_

#include <cuda_runtime_api.h>

#include <cstddef>

namespace thinwire::kernels {

// Of the current device, for work that is queued on the stream within the scope. Nothing waits:
// whoever gets the memory next, on whatever stream, comes after that work. In a stream that is
// being captured it becomes a part of the graph.
class StreamMemory {
 public:
  StreamMemory(size_t bytes, cudaStream_t stream);  // 0 bytes: none
  ~StreamMemory();
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;

  cudaError_t error() const { return error_; }
  void* data() const { return data_; }

 private:
  const cudaStream_t stream_;
  void* data_ = nullptr;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_CUDA_STREAM_MEMORY_H_
