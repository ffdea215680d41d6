#include "schedule/collective/momentum.h"

namespace thinwire {
namespace {

// fp32 to any dtype: an fp32 shard is the floats themselves.
void Store(const Backend& backend, std::span<const float> values, TensorView out) {
  backend.Decode(LosslessSpec(DType::kF32), reinterpret_cast<const uint8_t*>(values.data()), out);
}

}  // namespace

void MomentumStep::Before(const Backend& backend, TensorView gradient, size_t offset) {
  const std::span<float> m = velocity_.subspan(offset, gradient.numel);
  if (options_.nesterov) backend.Copy(scratch_.data() + offset, m.data(), m.size_bytes());
  backend.Accumulate(gradient, options_.beta, m);
}

void MomentumStep::After(const Backend& backend, TensorView output, size_t offset) {
  const std::span<float> m = velocity_.subspan(offset, output.numel);
  if (!options_.nesterov) return Store(backend, m, output);
  // The step is g + beta * m, with the mean gradient g = m - beta * m_old.
  const std::span<float> g = scratch_.subspan(offset, output.numel);
  const std::span<float> step = scratch_.subspan(velocity_.size() + offset, output.numel);
  backend.Accumulate({m.data(), m.size()}, -options_.beta, g);
  backend.Copy(step.data(), m.data(), m.size_bytes());
  backend.Accumulate({g.data(), g.size()}, options_.beta, step);
  Store(backend, step, output);
}

}  // namespace thinwire
