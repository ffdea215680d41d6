// The backend that runs the codecs' scalar references, which are normative.
#include <algorithm>
#include <cstring>
#include <vector>

#include "compress/backend.h"
#include "compress/codec_info.h"
#include "compress/codecs/reference.h"

namespace thinwire {
namespace {

std::vector<float> DecodeValues(const CodecSpec& spec, const uint8_t* wire, size_t numel) {
  std::vector<float> values(numel);
  const CodecOperations& codec = InfoOf(spec.id).scalar;
  if (spec.traits().entries()) {
    codec.decode_entries(spec, wire, {values.data(), numel});
  } else {
    const Shard shard(spec, numel);
    Walk walk;
    if (codec.begin != nullptr) codec.begin(shard, wire, &walk);
    codec.decode({shard, 0, numel, &walk}, wire, values.data());
  }
  return values;
}

// m_own of an EncodeArgs, or the gradient.
std::vector<float> InputOf(const EncodeArgs& args) {
  std::vector<float> values(args.gradient.numel);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = Load(args.gradient, i);
    const Momentum& momentum = args.momentum;
    if (momentum.velocity != nullptr) values[i] = momentum.beta * momentum.velocity[i] + values[i];
  }
  return values;
}

class ScalarBackendImpl final : public Backend {
 public:
  void EncodeAll(const CodecSpec& spec, std::span<const EncodeArgs> shards) const override {
    for (const EncodeArgs& shard : shards) EncodeOne(spec, shard);
  }

  void DecodeAll(const CodecSpec& spec, std::span<const DecodeArgs> shards) const override {
    for (const auto& [wire, out] : shards) {
      const std::vector<float> values = DecodeValues(spec, wire, out.numel);
      for (size_t i = 0; i < out.numel; ++i) Store(out, i, values[i]);
    }
  }

  void DecodeAdd(const CodecSpec& spec, const uint8_t* wire, std::span<float> sum) const override {
    if (spec.traits().entries()) {
      return InfoOf(spec.id).scalar.add_entries(spec, wire, 1.0f, sum);
    }
    const Shard shard(spec, sum.size());
    const CodecOperations& codec = InfoOf(spec.id).scalar;
    Walk walk;
    if (codec.begin != nullptr) codec.begin(shard, wire, &walk);
    codec.decode_add({shard, 0, sum.size(), &walk}, wire, sum.data());
  }

  void SumEntries(const CodecSpec& spec, std::span<const uint8_t* const> wires, float factor,
                  std::span<float> sum) const override {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (const uint8_t* wire : wires) {
      InfoOf(spec.id).scalar.add_entries(spec, wire, factor, sum);
    }
  }

  void Accumulate(TensorView gradient, float factor, std::span<const float> base,
                  std::span<float> sum) const override {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = factor * base[i] + Load(gradient, i);
  }

  void EndMomentum(const Momentum& momentum, std::span<float> m, TensorView out) const override {
    for (size_t i = 0; i < m.size(); ++i) {
      const float g = -momentum.beta * momentum.velocity[i] + m[i];
      if (IsFinite(m[i])) momentum.velocity[i] = m[i];
      Store(out, i, momentum.nesterov ? momentum.beta * m[i] + g : m[i]);
    }
  }

  void CopyFinite(std::span<const float> from, std::span<float> to) const override {
    for (size_t i = 0; i < to.size(); ++i) {
      if (IsFinite(from[i])) to[i] = from[i];
    }
  }

  void Reduce(const ReduceArgs& args) const override {
    const size_t numel = args.own.numel;
    std::vector<float> mean(numel);
    for (size_t r = 0; r < args.wires.size(); ++r) {
      const std::vector<float> values = args.wires[r] == nullptr
                                            ? std::vector<float>()
                                            : DecodeValues(args.up, args.wires[r], numel);
      for (size_t i = 0; i < numel; ++i) {
        const float value = values.empty() ? Load(args.own, i) : values[i];
        mean[i] = r == 0 ? value : mean[i] + value;
      }
    }
    for (float& value : mean) value *= args.scale;
    std::vector<uint8_t> wire(EncodedBytes(args.down, numel));
    Encode(args.down, {mean.data(), numel}, args.residual, wire.data(), args.draws);
    Decode(args.down, wire.data(), args.out);
    if (args.wire_out != nullptr) std::memcpy(args.wire_out, wire.data(), wire.size());
  }

 private:
  static void EncodeOne(const CodecSpec& spec, const EncodeArgs& args) {
    const size_t numel = args.gradient.numel;
    if (numel == 0) return;
    const CodecOperations& codec = InfoOf(spec.id).scalar;
    std::memset(args.wire, 0, EncodedBytes(spec, numel));
    if (spec.traits().entries()) return codec.encode_entries(spec, args);
    const Shard shard(spec, numel, args.draws);
    const std::vector<float> values = InputOf(args);
    Walk walk;
    const Piece piece(shard, 0, numel, &walk);
    if (codec.heads != nullptr) {
      codec.heads(piece, values.data(), args.residual, args.wire);
      codec.begin(shard, args.wire, &walk);
    }
    codec.encode(piece, values.data(), args.residual, args.wire);
  }
};

}  // namespace

const Backend& ScalarBackend() {
  static const ScalarBackendImpl backend;
  return backend;
}

}  // namespace thinwire
