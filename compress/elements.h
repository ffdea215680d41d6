// Single elements of a tensor of any dtype and alignment, for the scalar reference.
#ifndef THINWIRE_COMPRESS_ELEMENTS_H_
#define THINWIRE_COMPRESS_ELEMENTS_H_

#include <cstddef>
#include <cstdint>

#include "compress/half_float.h"
#include "compress/types.h"
#include "compress/unaligned.h"

namespace thinwire {

inline float Load(const TensorView& view, size_t i) {
  switch (view.dtype) {
    case DType::kF32: return Get<float>(view.data, i);
    case DType::kBF16: return FromBf16(Get<uint16_t>(view.data, i));
    case DType::kF16: return FromF16(Get<uint16_t>(view.data, i));
  }
  return 0.0f;
}

inline void Store(const TensorView& view, size_t i, float value) {
  switch (view.dtype) {
    case DType::kF32: return Put(view.data, i, value);
    case DType::kBF16: return Put(view.data, i, ToBf16(value));
    case DType::kF16: return Put(view.data, i, ToF16(value));
  }
}

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_ELEMENTS_H_
