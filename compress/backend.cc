#include "compress/backend.h"

#include <algorithm>

namespace thinwire {
namespace {

// Stage by stage, so that what is not zero is found early.
bool AllZero(std::span<const float> values) {
  constexpr size_t kStage = 1024;
  for (size_t begin = 0; begin < values.size(); begin += kStage) {
    bool zero = true;
    for (const float value : values.subspan(begin, std::min(kStage, values.size() - begin))) {
      zero &= value == 0.0f;
    }
    if (!zero) return false;
  }
  return true;
}

}  // namespace

void Backend::EncodeAll(const CodecSpec& spec, std::span<const EncodeArgs> shards) const {
  for (const EncodeArgs& shard : shards) {
    TensorView input = shard.gradient;
    if (const Momentum& momentum = shard.momentum; momentum.velocity != nullptr) {
      const std::span<float> own(shard.room, input.numel);
      BeginMomentum(input, momentum.beta, {momentum.velocity, input.numel}, own);
      input = {own.data(), own.size()};
    }
    Encode(spec, input, shard.residual, shard.wire, shard.extras);
  }
}

bool Backend::AreZero(std::span<const std::span<const float>> parts, float* known) const {
  if (known != nullptr && *known != 0.0f) return true;
  if (!std::all_of(parts.begin(), parts.end(), AllZero)) return false;
  if (known != nullptr) *known = 1.0f;
  return true;
}

void Backend::BeginMomentum(TensorView gradient, float beta, std::span<const float> velocity,
                            std::span<float> own) const {
  Copy(own.data(), velocity.data(), velocity.size_bytes());
  Accumulate(gradient, beta, own);
}

void Backend::EndMomentum(const Momentum& momentum, std::span<float> m, std::span<float> spare,
                          TensorView out) const {
  const std::span<float> velocity(momentum.velocity, m.size());
  if (momentum.nesterov) {
    const std::span<float> g = spare.first(m.size());
    Copy(g.data(), velocity.data(), velocity.size_bytes());
    Accumulate({m.data(), m.size()}, -momentum.beta, g);
    CopyFinite(m, velocity);
    Accumulate({g.data(), g.size()}, momentum.beta, m);
  } else {
    CopyFinite(m, velocity);
  }
  // fp32 to any dtype: an fp32 shard is the floats themselves.
  Decode(LosslessSpec(DType::kF32), reinterpret_cast<const uint8_t*>(m.data()), out);
}

}  // namespace thinwire
