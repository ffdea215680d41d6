// Dispatch of a codec and a dtype, known at run time, to the types that kernels are compiled for.
// Host code.
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

// Calls visit(Variant) for a codec of the list whose kernels are those of tiles.h. The backend
// launches no other one in this way.
template <typename First, typename... Rest, typename Visit>
auto ForCodecOf(CodecTypes<First, Rest...>, const Codec& codec, Visit visit) {
  if constexpr (!kInTiles<First>) {
    return ForCodecOf(CodecTypes<Rest...>(), codec, visit);
  } else {
    if constexpr (AnyInTiles(CodecTypes<Rest...>())) {
      if (codec.id != First::kTraits.id) return ForCodecOf(CodecTypes<Rest...>(), codec, visit);
    }
    if constexpr (kTransforms<First>) {
      if (codec.hadamard) return visit(Variant<First, true>());
    }
    return visit(Variant<First>());
  }
}

template <typename Visit>
auto ForCodec(const Codec& codec, Visit visit) {
  return ForCodecOf(AllCodecs(), codec, visit);
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_DISPATCH_H_
