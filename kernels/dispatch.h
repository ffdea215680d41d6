// From a codec and a dtype known at run time to the types that kernels are compiled for. Host code.
#ifndef THINWIRE_KERNELS_DISPATCH_H_
#define THINWIRE_KERNELS_DISPATCH_H_

#include <type_traits>

#include "kernels/codes.h"
#include "kernels/jobs.h"

namespace thinwire::kernels {

template <DType kDType>
using DTypeTag = std::integral_constant<DType, kDType>;

// Calls visit(DTypeTag).
template <typename Visit>
auto ForDType(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kBF16: return visit(DTypeTag<DType::kBF16>());
    case DType::kF16: return visit(DTypeTag<DType::kF16>());
    case DType::kF32: break;
  }
  return visit(DTypeTag<DType::kF32>());
}

// Calls visit(CodecTraits).
template <typename Visit>
auto ForCodec(const Codec& codec, Visit visit) {
  switch (codec.id) {
    case CodecId::kBf16: return visit(CodecTraits<CodecId::kBf16>());
    case CodecId::kInt8: return visit(CodecTraits<CodecId::kInt8>());
    case CodecId::kInt4:
      if (codec.hadamard) return visit(CodecTraits<CodecId::kInt4, true>());
      return visit(CodecTraits<CodecId::kInt4>());
    case CodecId::kOneBit: return visit(CodecTraits<CodecId::kOneBit>());
    case CodecId::kFp32:
    case CodecId::kTopK: break;  // nobody launches topk: see MakeCodec
  }
  return visit(CodecTraits<CodecId::kFp32>());
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_DISPATCH_H_
