#include "compress/backend.h"

namespace thinwire {

void Backend::EncodeAll(const CodecSpec& spec, std::span<const EncodeArgs> shards) const {
  for (const EncodeArgs& shard : shards) {
    TensorView input = shard.gradient;
    if (const EncodeMomentum& momentum = shard.momentum; momentum.velocity != nullptr) {
      const std::span<float> own(momentum.room, input.numel);
      BeginMomentum(input, momentum.beta, {momentum.velocity, input.numel}, own);
      input = {own.data(), own.size()};
    }
    Encode(spec, input, shard.residual, shard.wire, shard.extras);
  }
}

void Backend::BeginMomentum(TensorView gradient, float beta, std::span<const float> velocity,
                            std::span<float> own) const {
  Copy(own.data(), velocity.data(), velocity.size_bytes());
  Accumulate(gradient, beta, own);
}

void Backend::EndMomentum(const MomentumArgs& args) const {
  const TensorView m{args.m.data(), args.m.size()};
  if (args.nesterov) {
    const std::span<float> g = args.spare.first(args.m.size());
    Copy(g.data(), args.velocity.data(), args.velocity.size_bytes());
    Accumulate(m, -args.beta, g);
    CopyFinite(args.m, args.velocity);
    Accumulate({g.data(), g.size()}, args.beta, args.m);
  } else {
    CopyFinite(args.m, args.velocity);
  }
  // fp32 to any dtype: an fp32 shard is the floats themselves.
  Decode(LosslessSpec(DType::kF32), reinterpret_cast<const uint8_t*>(m.data), args.out);
}

}  // namespace thinwire
