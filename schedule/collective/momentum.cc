#include "schedule/collective/momentum.h"

namespace thinwire {

void MomentumStep::Before(const Backend& backend, TensorView gradient, size_t offset) {
  backend.BeginMomentum(gradient, momentum_.beta, {momentum_.velocity + offset, gradient.numel},
                        reduced_.subspan(offset, gradient.numel));
}

void MomentumStep::After(const Backend& backend, TensorView m, TensorView output, size_t offset) {
  const std::span<float> reduced(static_cast<float*>(m.data), m.numel);
  const Momentum momentum = momentum_.From(offset);
  if (m.data == output.data) return backend.CopyFinite(reduced, {momentum.velocity, m.numel});
  backend.EndMomentum(momentum, reduced, spare_.empty() ? spare_ : spare_.subspan(offset, m.numel),
                      output);
}

}  // namespace thinwire
