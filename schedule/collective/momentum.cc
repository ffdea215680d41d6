#include "schedule/collective/momentum.h"

namespace thinwire {
namespace {

// fp32 to any dtype: an fp32 shard is the floats themselves.
void Store(const Backend& backend, std::span<const float> values, TensorView out) {
  backend.Decode(LosslessSpec(DType::kF32), reinterpret_cast<const uint8_t*>(values.data()), out);
}

TensorView View(std::span<float> values) { return {values.data(), values.size()}; }

}  // namespace

void MomentumStep::Before(const Backend& backend, TensorView gradient, size_t offset) {
  const std::span<float> m = velocity_.subspan(offset, gradient.numel);
  const std::span<float> own = reduced_.subspan(offset, gradient.numel);
  backend.Copy(own.data(), m.data(), m.size_bytes());
  backend.Accumulate(gradient, options_.beta, own);
}

void MomentumStep::After(const Backend& backend, TensorView output, size_t offset) {
  const std::span<float> old = velocity_.subspan(offset, output.numel);
  const std::span<float> m = reduced_.subspan(offset, output.numel);
  if (!options_.nesterov) {
    Store(backend, m, output);
    return backend.CopyFinite(m, old);
  }
  // The step is g + beta * m, with the mean gradient g = m - beta * old.
  const std::span<float> g = gradient_.subspan(offset, output.numel);
  backend.Copy(g.data(), old.data(), old.size_bytes());
  backend.Accumulate(View(m), -options_.beta, g);
  backend.CopyFinite(m, old);
  backend.Accumulate(View(g), options_.beta, m);
  Store(backend, m, output);
}

}  // namespace thinwire
