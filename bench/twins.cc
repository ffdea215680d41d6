#include "bench/twins.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/twins.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace thinwire::twin::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using F = hn::ScalableTag<float>;
using U8 = hn::Repartition<uint8_t, F>;
using V = hn::Vec<F>;

// One step is as many vectors of floats as fill one vector of codes.
HWY_INLINE size_t VectorsOf(double bits) { return static_cast<size_t>(32 / bits); }

// Calls body(first element, first code byte, vectors) for each step.
template <class Body>
HWY_INLINE void ForSteps(size_t n, double bits, Body body) {
  const size_t lanes = hn::Lanes(F()), vectors = VectorsOf(bits), bytes = lanes * sizeof(float);
  for (size_t i = 0, at = 0; i < n; i += lanes * vectors, at += bytes) body(i, at, vectors);
}

HWY_INLINE V CodesAsFloats(const uint8_t* codes) { return hn::BitCast(F(), hn::Load(U8(), codes)); }
HWY_INLINE void StoreAsCodes(V v, uint8_t* codes) { hn::Store(hn::BitCast(U8(), v), U8(), codes); }

void EncodeWithFeedbackT(const float* g, float* r, uint8_t* codes, size_t n, double bits) {
  const F d;
  const size_t lanes = hn::Lanes(d);
  ForSteps(n, bits, [&](size_t i, size_t at, size_t vectors) HWY_ATTR {
    V last = hn::Zero(d);
    for (size_t j = 0; j < vectors; ++j) {
      last = hn::Add(hn::Load(d, g + i + lanes * j), hn::Load(d, r + i + lanes * j));
      hn::Store(last, d, r + i + lanes * j);
    }
    StoreAsCodes(last, codes + at);
  });
}

void AccumulateT(const float* g, float* r, size_t n) {
  const F d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    hn::Store(hn::Add(hn::Load(d, g + i), hn::Load(d, r + i)), d, r + i);
  }
}

void EncodeT(const float* g, uint8_t* codes, size_t n, double bits) {
  const F d;
  const size_t lanes = hn::Lanes(d);
  ForSteps(n, bits, [&](size_t i, size_t at, size_t vectors) HWY_ATTR {
    V all = hn::Zero(d);
    for (size_t j = 0; j < vectors; ++j) all = hn::Xor(all, hn::Load(d, g + i + lanes * j));
    StoreAsCodes(all, codes + at);
  });
}

void DecodeT(const uint8_t* codes, float* out, size_t n, double bits) {
  const F d;
  const size_t lanes = hn::Lanes(d);
  ForSteps(n, bits, [&](size_t i, size_t at, size_t vectors) HWY_ATTR {
    const V v = CodesAsFloats(codes + at);
    for (size_t j = 0; j < vectors; ++j) hn::Store(v, d, out + i + lanes * j);
  });
}

void DecodeAddT(const uint8_t* codes, float* sum, size_t n, double bits) {
  const F d;
  const size_t lanes = hn::Lanes(d);
  ForSteps(n, bits, [&](size_t i, size_t at, size_t vectors) HWY_ATTR {
    const V v = CodesAsFloats(codes + at);
    for (size_t j = 0; j < vectors; ++j) {
      float* place = sum + i + lanes * j;
      hn::Store(hn::Add(hn::Load(d, place), v), d, place);
    }
  });
}

void ReduceT(const float* own, const uint8_t* peer, float* r, float* out, uint8_t* codes, size_t n,
             double bits) {
  const F d;
  const size_t lanes = hn::Lanes(d);
  ForSteps(n, bits, [&](size_t i, size_t at, size_t vectors) HWY_ATTR {
    const V v = CodesAsFloats(peer + at);
    V x = v;
    for (size_t j = 0; j < vectors; ++j) {
      const size_t k = i + lanes * j;
      x = hn::Add(hn::Add(hn::Load(d, own + k), v), hn::Load(d, r + k));
      hn::Store(x, d, r + k);
      hn::Store(x, d, out + k);
    }
    StoreAsCodes(x, codes + at);
  });
}

}  // namespace thinwire::twin::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thinwire::twin {

HWY_EXPORT(EncodeWithFeedbackT);
HWY_EXPORT(AccumulateT);
HWY_EXPORT(EncodeT);
HWY_EXPORT(DecodeT);
HWY_EXPORT(DecodeAddT);
HWY_EXPORT(ReduceT);

void EncodeWithFeedback(const float* g, float* r, uint8_t* codes, size_t n, double bits) {
  HWY_DYNAMIC_DISPATCH(EncodeWithFeedbackT)(g, r, codes, n, bits);
}
void Accumulate(const float* g, float* r, size_t n) { HWY_DYNAMIC_DISPATCH(AccumulateT)(g, r, n); }
void Encode(const float* g, uint8_t* codes, size_t n, double bits) {
  HWY_DYNAMIC_DISPATCH(EncodeT)(g, codes, n, bits);
}
void Decode(const uint8_t* codes, float* out, size_t n, double bits) {
  HWY_DYNAMIC_DISPATCH(DecodeT)(codes, out, n, bits);
}
void DecodeAdd(const uint8_t* codes, float* sum, size_t n, double bits) {
  HWY_DYNAMIC_DISPATCH(DecodeAddT)(codes, sum, n, bits);
}
void Reduce(const float* own, const uint8_t* peer, float* r, float* out, uint8_t* codes, size_t n,
            double bits) {
  HWY_DYNAMIC_DISPATCH(ReduceT)(own, peer, r, out, codes, n, bits);
}

}  // namespace thinwire::twin
#endif  // HWY_ONCE
