#include "kernels/cuda_stream_memory.h"

#include <array>
#include <atomic>
#include <cstdint>

namespace thinwire::kernels {
namespace {

cudaError_t MakePool(int ordinal, cudaMemPool_t* pool) {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location = {.type = cudaMemLocationTypeDevice, .id = ordinal};
  cudaError_t error = cudaMemPoolCreate(pool, &properties);
  if (error != cudaSuccess) return error;
  uint64_t all = UINT64_MAX;  // keep freed memory, so that the steady state allocates nothing
  error = cudaMemPoolSetAttribute(*pool, cudaMemPoolAttrReleaseThreshold, &all);
  if (error != cudaSuccess) cudaMemPoolDestroy(*pool);
  return error;
}

// A pool of our own: the device's default one belongs to the process, and returns memory at every
// synchronisation. Pools live as long as the process.
cudaError_t PoolOfCurrentDevice(cudaMemPool_t* pool) {
  constexpr int kDevices = 64;  // more than a host has
  static std::array<std::atomic<cudaMemPool_t>, kDevices> pools;
  int ordinal = 0;
  if (const cudaError_t error = cudaGetDevice(&ordinal); error != cudaSuccess) return error;
  if (ordinal >= kDevices) return cudaErrorInvalidDevice;
  *pool = pools[ordinal];
  if (*pool != nullptr) return cudaSuccess;
  if (const cudaError_t error = MakePool(ordinal, pool); error != cudaSuccess) return error;
  cudaMemPool_t first = nullptr;
  if (pools[ordinal].compare_exchange_strong(first, *pool)) return cudaSuccess;
  cudaMemPoolDestroy(*pool);  // another thread was first
  *pool = first;
  return cudaSuccess;
}

}  // namespace

StreamMemory::StreamMemory(uint8_t* given, size_t bytes, cudaStream_t stream)
    : given_(given), stream_(stream) {
  if (given != nullptr) return;
  cudaMemPool_t pool = nullptr;
  error_ = PoolOfCurrentDevice(&pool);
  if (error_ == cudaSuccess) error_ = cudaMallocFromPoolAsync(&own_, bytes, pool, stream);
  if (error_ == cudaSuccess) return;
  cudaGetLastError();  // it is returned here: the next launch must not report it
}

StreamMemory::~StreamMemory() {
  if (own_ != nullptr) cudaFreeAsync(own_, stream_);
}

}  // namespace thinwire::kernels
