#include "schedule/collective/momentum.h"

namespace thinwire {

void MomentumStep::Before(const Arithmetic& arithmetic, TensorView gradient, size_t offset) {
  arithmetic.Accumulate(gradient, momentum_.beta, {momentum_.velocity + offset, gradient.numel},
                        reduced_.subspan(offset, gradient.numel));
}

void MomentumStep::After(const Arithmetic& arithmetic, TensorView m, TensorView output,
                         size_t offset) {
  const std::span<float> reduced(static_cast<float*>(m.data), m.numel);
  const Momentum momentum = momentum_.From(offset);
  if (m.data == output.data) return arithmetic.CopyFinite(reduced, {momentum.velocity, m.numel});
  arithmetic.EndMomentum(momentum, reduced, output);
}

}  // namespace thinwire
