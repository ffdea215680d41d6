// The launches of codecs of widths, which the functions of cuda_launch.h call.
#ifndef THINWIRE_KERNELS_CUDA_WIDTHS_H_
#define THINWIRE_KERNELS_CUDA_WIDTHS_H_

#include <cuda_runtime_api.h>

#include "kernels/widths.h"

namespace thinwire::kernels {

cudaError_t LaunchEncodeWidths(const EncodeLaunch& launch, cudaStream_t stream);
cudaError_t LaunchDecodeWidths(const DecodeLaunch& launch, cudaStream_t stream);

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_CUDA_WIDTHS_H_
