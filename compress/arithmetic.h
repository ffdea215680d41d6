// Arithmetic: passes over fp32 and tensors that belong to no codec: copies, sums, momentum. Each
// Backend (compress/backend.h) is one, on the same device, under the same rules.
#ifndef THINWIRE_COMPRESS_ARITHMETIC_H_
#define THINWIRE_COMPRESS_ARITHMETIC_H_

#include <cstddef>
#include <cstring>
#include <span>

#include "compress/types.h"

namespace thinwire {

class Arithmetic {
 public:
  virtual ~Arithmetic() = default;

  // On a device the two must not overlap, unless they are the same.
  virtual void Copy(void* to, const void* from, size_t bytes) const {
    if (bytes > 0 && to != from) std::memmove(to, from, bytes);
  }

  // to[i] = from[i] where that is finite; elsewhere `to` stays as it was. They have one size and do
  // not overlap.
  virtual void CopyFinite(std::span<const float> from, std::span<float> to) const = 0;

  // sum = factor * base + gradient, in fp32, product and sum rounded one after the other. `base`
  // and `sum` may be the same memory; all have one size.
  virtual void Accumulate(TensorView gradient, float factor, std::span<const float> base,
                          std::span<float> sum) const = 0;

  // The end of a step of momentum, once an exchange has made the new `m`, which is used up: the
  // velocity becomes m where that is finite, and `out` m; with Nesterov g + beta * m, where g =
  // m - beta * the last velocity. It began with Accumulate(gradient, beta, velocity, m_own).
  virtual void EndMomentum(const Momentum& momentum, std::span<float> m, TensorView out) const = 0;

  // True if all of them are zero. `*known` remembers that they are, which spares the reading: it is
  // zero again whenever they may have changed. Null: nothing is known. False where looking would
  // cost more than it may save: on a device.
  virtual bool AreZero(std::span<const std::span<const float>> parts, float* known) const;
};

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_ARITHMETIC_H_
