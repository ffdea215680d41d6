// The launches behind DeviceApi's entries of these names, each on a stream, without waiting. They
// can be captured in a CUDA graph: they read no host memory later, and only StreamMemory allocates,
// in the stream's order.
#ifndef THINWIRE_KERNELS_CUDA_LAUNCH_H_
#define THINWIRE_KERNELS_CUDA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "kernels/entry_jobs.h"

namespace thinwire::kernels {

cudaError_t LaunchEncode(const EncodeLaunch& launch, cudaStream_t stream);
cudaError_t LaunchDecode(const DecodeLaunch& launch, cudaStream_t stream);
cudaError_t LaunchAccumulate(const AccumulateLaunch& launch, cudaStream_t stream);
cudaError_t LaunchEndMomentum(const MomentumLaunch& launch, cudaStream_t stream);
cudaError_t LaunchReduce(const ReduceLaunch& launch, cudaStream_t stream);
cudaError_t LaunchReduceInParts(const ReduceLaunch& launch, cudaStream_t stream);  // in parts
cudaError_t LaunchEncodeEntries(const EncodeEntriesLaunch& launch, cudaStream_t stream);
cudaError_t LaunchAddEntries(const AddEntriesLaunch& launch, cudaStream_t stream);

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_CUDA_LAUNCH_H_
