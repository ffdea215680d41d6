#include "schedule/collective/momentum.h"

namespace thinwire {

void MomentumStep::Before(const Backend& backend, TensorView gradient, size_t offset) {
  backend.BeginMomentum(gradient, options_.beta, velocity_.subspan(offset, gradient.numel),
                        reduced_.subspan(offset, gradient.numel));
}

void MomentumStep::After(const Backend& backend, TensorView m, TensorView output, size_t offset) {
  const std::span<float> reduced(static_cast<float*>(m.data), m.numel);
  const std::span<float> velocity = velocity_.subspan(offset, m.numel);
  if (m.data == output.data) return backend.CopyFinite(reduced, velocity);
  backend.EndMomentum({.beta = options_.beta,
                       .nesterov = options_.nesterov,
                       .m = reduced,
                       .velocity = velocity,
                       .spare = spare_.empty() ? spare_ : spare_.subspan(offset, m.numel),
                       .out = output});
}

}  // namespace thinwire
