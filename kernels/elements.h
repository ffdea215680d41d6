// Converts quads of elements from memory of any dtype to fp32 and back.
#ifndef THINWIRE_KERNELS_ELEMENTS_H_
#define THINWIRE_KERNELS_ELEMENTS_H_

#include "compress/element_math.h"
#include "compress/types.h"
#include "kernels/jobs.h"
#include "kernels/tile.h"
#include "kernels/word.h"

namespace thinwire::kernels {

// How one element is stored in memory.
template <DType kDType>
struct Stored;

template <>
struct Stored<DType::kF32> {
  using Type = float;
  THINWIRE_HD static float Load(float value) { return value; }
  THINWIRE_HD static float Store(float value) { return value; }
};

template <>
struct Stored<DType::kBF16> {
  using Type = uint16_t;
  THINWIRE_HD static float Load(uint16_t half) { return FromBf16(half); }
  THINWIRE_HD static uint16_t Store(float value) { return ToBf16(value); }
};

template <>
struct Stored<DType::kF16> {
  using Type = uint16_t;
  THINWIRE_HD static float Load(uint16_t half) { return FromF16(half); }
  THINWIRE_HD static uint16_t Store(float value) { return ToF16(value); }
};

// Elements [place, place + 4), which must be loadable at once.
template <DType kDType>
THINWIRE_HD void LoadWholeQuad(const Elements& from, size_t place, float* out) {
  using T = typename Stored<kDType>::Type;
  alignas(kQuad * sizeof(T)) T quad[kQuad];
  CopyWord<sizeof(quad)>(quad, static_cast<const T*>(from.data) + place);
  THINWIRE_UNROLL
  for (unsigned i = 0; i < kQuad; ++i) out[i] = Stored<kDType>::Load(quad[i]);
}

template <DType kDType>
THINWIRE_HD void StoreWholeQuad(const float* values, size_t place, const Elements& to) {
  using T = typename Stored<kDType>::Type;
  alignas(kQuad * sizeof(T)) T quad[kQuad];
  THINWIRE_UNROLL
  for (unsigned i = 0; i < kQuad; ++i) quad[i] = Stored<kDType>::Store(values[i]);
  CopyWord<sizeof(quad)>(static_cast<T*>(to.data) + place, quad);
}

// Elements [place, place + 4) of `numel`; zeros after the last one.
template <DType kDType>
THINWIRE_HD void LoadQuad(const Elements& from, size_t place, size_t numel, float* out) {
  using T = typename Stored<kDType>::Type;
  const T* data = static_cast<const T*>(from.data) + place;
  if (from.quads && place + kQuad <= numel) {
    LoadWholeQuad<kDType>(from, place, out);
  } else {
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) {
      out[i] = place + i < numel ? Stored<kDType>::Load(data[i]) : 0.0f;
    }
  }
}

template <DType kDType>
THINWIRE_HD void StoreQuad(const float* values, size_t place, size_t numel, const Elements& to) {
  using T = typename Stored<kDType>::Type;
  T* data = static_cast<T*>(to.data) + place;
  if (to.quads && place + kQuad <= numel) {
    StoreWholeQuad<kDType>(values, place, to);
  } else {
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) {
      if (place + i < numel) data[i] = Stored<kDType>::Store(values[i]);
    }
  }
}

// All quads of a tile that a thread holds.
template <DType kDType>
THINWIRE_HD void LoadValues(const Elements& from, const TileRange& tile, unsigned thread,
                            Values& out) {
  if (from.quads && tile.full()) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      LoadWholeQuad<kDType>(from, tile.Place(thread, q), out.v + q * kQuad);
    }
    return;
  }
  THINWIRE_UNROLL
  for (unsigned q = 0; q < kQuads; ++q) {
    LoadQuad<kDType>(from, tile.Place(thread, q), tile.numel, out.v + q * kQuad);
  }
}

template <DType kDType>
THINWIRE_HD void StoreValues(const Values& values, const TileRange& tile, unsigned thread,
                             const Elements& to) {
  if (to.quads && tile.full()) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      StoreWholeQuad<kDType>(values.v + q * kQuad, tile.Place(thread, q), to);
    }
    return;
  }
  THINWIRE_UNROLL
  for (unsigned q = 0; q < kQuads; ++q) {
    StoreQuad<kDType>(values.v + q * kQuad, tile.Place(thread, q), tile.numel, to);
  }
}

// The same for a dtype that is only known at run time, where a kernel per dtype is not worthwhile.
THINWIRE_HD void LoadValuesOf(DType dtype, const Elements& from, const TileRange& tile,
                              unsigned thread, Values& out) {
  switch (dtype) {
    case DType::kBF16: return LoadValues<DType::kBF16>(from, tile, thread, out);
    case DType::kF16: return LoadValues<DType::kF16>(from, tile, thread, out);
    case DType::kF32: return LoadValues<DType::kF32>(from, tile, thread, out);
  }
}

THINWIRE_HD void StoreValuesOf(DType dtype, const Values& values, const TileRange& tile,
                               unsigned thread, const Elements& to) {
  switch (dtype) {
    case DType::kBF16: return StoreValues<DType::kBF16>(values, tile, thread, to);
    case DType::kF16: return StoreValues<DType::kF16>(values, tile, thread, to);
    case DType::kF32: return StoreValues<DType::kF32>(values, tile, thread, to);
  }
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_ELEMENTS_H_
