// DeviceTeam: a thread block. Implements the interface that tests/host_device/host_team.h
// describes.
#ifndef THINWIRE_KERNELS_CUDA_TEAM_CUH_
#define THINWIRE_KERNELS_CUDA_TEAM_CUH_

#include <cuda_pipeline_primitives.h>

#include <cstdint>
#include <cub/warp/warp_reduce.cuh>
#include <cuda/functional>

#include "kernels/tile.h"
#include "kernels/word.h"

namespace thinwire::kernels {

class DeviceTeam {
  using Reduction = cub::WarpReduce<uint32_t>;

 public:
  // Shared memory for the collectives.
  struct Scratch {
    typename Reduction::TempStorage warps[kThreads / kWarp];
  };

  explicit __device__ __forceinline__ DeviceTeam(Scratch& scratch) : scratch_(scratch) {}

  // One register per thread.
  template <typename T>
  class PerThread {
   public:
    __device__ __forceinline__ T& operator[](unsigned) { return value_; }

   private:
    T value_;
  };

  template <typename T, unsigned kCount>
  class Shared {
   public:
    __device__ __forceinline__ T Get(const DeviceTeam&, unsigned, unsigned i) const {
      return values_[i];
    }
    __device__ __forceinline__ void Put(const DeviceTeam&, unsigned, unsigned i, T value) {
      values_[i] = value;
    }
    __device__ __forceinline__ void Add(const DeviceTeam&, unsigned, unsigned i, T value) {
      atomicAdd(&values_[i], value);
    }

   private:
    alignas(16) T values_[kCount];  // a thread's quad is one access
  };

  // Filled by cp.async; on Turing by loads and stores, immediately.
  template <unsigned kBytes>
  class Staged {
   public:
    template <unsigned kCount>
    __device__ __forceinline__ void Fetch(const DeviceTeam&, unsigned, unsigned at,
                                          const uint8_t* from) {
      __pipeline_memcpy_async(bytes_ + at, from, kCount);
    }
    template <unsigned kCount>
    __device__ __forceinline__ void Get(const DeviceTeam&, unsigned, unsigned at, void* to) const {
      CopyWord<kCount>(to, bytes_ + at);
    }

   private:
    alignas(16) uint8_t bytes_[kBytes];
  };

  __device__ __forceinline__ void CommitFetches() { __pipeline_commit(); }
  template <unsigned kLater>
  __device__ __forceinline__ void AwaitFetches() {
    __pipeline_wait_prior(kLater);
  }

  template <typename Body>
  __device__ __forceinline__ void ForEach(Body body) {
    body(threadIdx.x);
  }

  __device__ __forceinline__ void Sync() { __syncthreads(); }
  __device__ __forceinline__ void SyncWarp() { __syncwarp(); }

  static __device__ __forceinline__ uint32_t AtomicAdd(uint32_t* sum, uint32_t value) {
    return atomicAdd(sum, value);
  }
  static __device__ __forceinline__ void Fence() { __threadfence(); }
  static __device__ __forceinline__ uint32_t Fresh(const uint32_t* word) { return __ldcg(word); }

  __device__ __forceinline__ void WarpMax(PerThread<uint32_t>& value) {
    uint32_t& own = value[threadIdx.x];
    own = Reduction(scratch_.warps[threadIdx.x / kWarp]).Reduce(own, ::cuda::maximum<>());
  }

  template <typename T>
  __device__ __forceinline__ void Exchange(PerThread<T>& value, unsigned mask,
                                           PerThread<T>& other) {
    other[threadIdx.x] = __shfl_xor_sync(0xffffffffu, value[threadIdx.x], mask);
  }

  // All values of a thread, one after the other.
  __device__ __forceinline__ void Exchange(PerThread<Values>& value, unsigned mask,
                                           PerThread<Values>& other) {
#pragma unroll
    for (unsigned i = 0; i < kQuads * kQuad; ++i) {
      other[threadIdx.x].v[i] = __shfl_xor_sync(0xffffffffu, value[threadIdx.x].v[i], mask);
    }
  }

 private:
  Scratch& scratch_;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_CUDA_TEAM_CUH_
