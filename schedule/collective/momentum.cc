#include "schedule/collective/momentum.h"

namespace thinwire {

void MomentumStep::Before(const Backend& backend, TensorView gradient, size_t offset) {
  backend.BeginMomentum(gradient, options_.beta, velocity_.subspan(offset, gradient.numel),
                        reduced_.subspan(offset, gradient.numel));
}

void MomentumStep::After(const Backend& backend, TensorView output, size_t offset) {
  const auto part = [&](std::span<float> whole) {
    return whole.empty() ? whole : whole.subspan(offset, output.numel);
  };
  backend.EndMomentum({.beta = options_.beta,
                       .nesterov = options_.nesterov,
                       .m = part(reduced_),
                       .velocity = part(velocity_),
                       .spare = part(spare_),
                       .out = output});
}

}  // namespace thinwire
