// Dispatches a codec and a dtype, known at run time, to the types that kernels are compiled for.
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

// Calls visit(Variant) for a codec whose kernels are those of tiles.h. The backend must launch no
// other codec in this way.
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

// Calls visit(up, down, DTypeTag) with the types of a reduction's kernel that is not in parts
// (reduce_parts.h): the result has the wires' codec, or is fp32.
template <typename Visit>
auto ForReduction(const ReduceLaunch& launch, Visit visit) {
  return ForDType(launch.dtype, [&](auto dtype) {
    return ForCodec(launch.up, [&](auto up) {
      using Down = Variant<codecs::Fp32>;
      if (launch.down.id == codecs::Fp32::kTraits.id) return visit(up, Down(), dtype);
      return visit(up, up, dtype);
    });
  });
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_DISPATCH_H_
