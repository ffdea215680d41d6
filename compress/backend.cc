#include "compress/backend.h"

namespace thinwire {

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
