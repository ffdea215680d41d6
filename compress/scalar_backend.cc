// The backend of the codecs' scalar references, which are normative.
#include <cstring>
#include <vector>

#include "compress/backend.h"
#include "compress/codec_info.h"
#include "compress/elements.h"
#include "compress/piece.h"

namespace thinwire {
namespace {

std::vector<float> DecodeValues(const CodecSpec& spec, const uint8_t* wire, size_t numel) {
  std::vector<float> values(numel);
  const CodecOperations& codec = InfoOf(spec.id).scalar;
  if (spec.traits().entries()) {
    codec.entries.decode(spec, wire, {values.data(), numel});
  } else {
    const Shard shard(spec, numel);
    Walk walk;
    if (codec.dense.begin != nullptr) codec.dense.begin(shard, wire, &walk);
    codec.dense.decode({shard, 0, numel, &walk}, wire, values.data());
  }
  return values;
}

class ScalarBackendImpl final : public Backend {
 public:
  void Encode(const CodecSpec& spec, TensorView gradient, float* residual, uint8_t* wire,
              const EncodeExtras& extras) const override {
    const size_t numel = gradient.numel;
    if (numel == 0) return;
    const Shard shard(spec, numel, extras.draws);
    std::memset(wire, 0, shard.layout.bytes);
    const CodecOperations& codec = InfoOf(spec.id).scalar;
    if (spec.traits().entries()) {
      return codec.entries.encode(spec, gradient, residual, wire, extras);
    }
    std::vector<float> values(numel);
    for (size_t i = 0; i < numel; ++i) values[i] = Load(gradient, i);
    Walk walk;
    const Piece piece(shard, 0, numel, &walk);
    if (codec.dense.heads != nullptr) {
      codec.dense.heads(piece, values.data(), residual, wire);
      codec.dense.begin(shard, wire, &walk);
    }
    codec.dense.encode(piece, values.data(), residual, wire);
  }

  void Decode(const CodecSpec& spec, const uint8_t* wire, TensorView out) const override {
    const std::vector<float> values = DecodeValues(spec, wire, out.numel);
    for (size_t i = 0; i < out.numel; ++i) Store(out, i, values[i]);
  }

  void DecodeAdd(const CodecSpec& spec, const uint8_t* wire, std::span<float> sum) const override {
    if (spec.traits().entries()) return AddEntries(spec, wire, 1.0f, sum);
    const Shard shard(spec, sum.size());
    const DenseOperations& codec = InfoOf(spec.id).scalar.dense;
    Walk walk;
    if (codec.begin != nullptr) codec.begin(shard, wire, &walk);
    codec.decode_add({shard, 0, sum.size(), &walk}, wire, sum.data());
  }

  void AddEntries(const CodecSpec& spec, const uint8_t* wire, float factor,
                  std::span<float> sum) const override {
    InfoOf(spec.id).scalar.entries.add(spec, wire, factor, sum);
  }

  void Accumulate(TensorView gradient, float factor, std::span<float> sum) const override {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = factor * sum[i] + Load(gradient, i);
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
    EncodeExtras extras;
    extras.draws = args.draws;
    Encode(args.down, {mean.data(), numel}, args.residual, wire.data(), extras);
    Decode(args.down, wire.data(), args.out);
    if (args.wire_out != nullptr) std::memcpy(args.wire_out, wire.data(), wire.size());
  }
};

}  // namespace

const Backend& ScalarBackend() {
  static const ScalarBackendImpl backend;
  return backend;
}

}  // namespace thinwire
