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

// The members of Moved that a loop accesses. Each combination has a loop of its own, without
// branches.
struct Touched {
  bool gradient = false, residual = false, codes_in = false;
  bool floats = false, add = false, codes_out = false;
};
constexpr Touched kReduce = {
    .gradient = true, .residual = true, .codes_in = true, .floats = true, .codes_out = true};

template <Touched t>
void Loop(const Moved m) {  // a copy, which no store can change
  const F d;
  const size_t lanes = hn::Lanes(d);
  // One step has as many vectors of floats as fill one vector of codes.
  const auto vectors = static_cast<size_t>(32 / m.bits);
  for (size_t i = 0, at = 0; i < m.numel; at += lanes * sizeof(float)) {
    V codes = hn::Zero(d), out = codes;
    if constexpr (t.codes_in) codes = hn::BitCast(d, hn::Load(U8(), m.codes_in + at));
    for (size_t j = 0; j < vectors; ++j, i += lanes) {
      V x = codes;
      if constexpr (t.gradient) {
        const V gradient = hn::Load(d, m.gradient + i);
        x = t.codes_in ? hn::Add(gradient, x) : gradient;
      }
      if constexpr (t.residual) {
        x = hn::Add(x, hn::Load(d, m.residual + i));
        hn::Store(x, d, m.residual + i);
      }
      if constexpr (t.add) x = hn::Add(hn::Load(d, m.floats + i), x);
      if constexpr (t.floats) hn::Store(x, d, m.floats + i);
      // Floats that are not stored must affect the codes, or the compiler could omit the loads.
      out = t.residual ? x : hn::Xor(out, x);
    }
    if constexpr (t.codes_out) hn::Store(hn::BitCast(U8(), out), U8(), m.codes_out + at);
  }
}

void MoveT(const Moved& m) {
  if (m.codes_in != nullptr && m.gradient != nullptr) return Loop<kReduce>(m);
  if (m.add) return Loop<Touched{.codes_in = true, .floats = true, .add = true}>(m);
  if (m.codes_in != nullptr) return Loop<Touched{.codes_in = true, .floats = true}>(m);
  if (m.residual == nullptr) return Loop<Touched{.gradient = true, .codes_out = true}>(m);
  if (m.codes_out == nullptr) return Loop<Touched{.gradient = true, .residual = true}>(m);
  Loop<Touched{.gradient = true, .residual = true, .codes_out = true}>(m);
}

}  // namespace thinwire::twin::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thinwire::twin {

HWY_EXPORT(MoveT);
void Move(const Moved& moved) { HWY_DYNAMIC_DISPATCH(MoveT)(moved); }

}  // namespace thinwire::twin
#endif  // HWY_ONCE
