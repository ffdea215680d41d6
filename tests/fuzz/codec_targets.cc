// Decoders accept any bytes that pass CheckWire; encoders accept any floats; both backends agree.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <vector>

#include "compress/backend.h"
#include "compress/codec_spec.h"
#include "compress/element_math.h"
#include "tests/fuzz/target.h"

namespace thinwire::fuzz {
namespace {

constexpr size_t kMostElements = 4096;
constexpr const char* kSpecs[] = {"fp32",
                                  "bf16",
                                  "int8",
                                  "int8:rounding=stochastic",
                                  "int4",
                                  "int4:block=128",
                                  "int4:hadamard=1",
                                  "onebit",
                                  "topk:density=0.1",
                                  "adaptive",
                                  "adaptive:bits=3.5,floor=1",
                                  "ternary:threshold=0.1"};

CodecSpec SpecOf(const char* text) { return *CodecSpec::Parse(text); }

CodecSpec AnySpec(Input& input) { return SpecOf(kSpecs[input.Below(std::size(kSpecs))]); }

// NaNs may differ in their payload.
bool Same(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (BitsOf(a[i]) != BitsOf(b[i]) && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  }
  return true;
}

// fp32 and bf16 send NaNs as they are. If an addition before that makes one NaN of two, the
// processor chooses which, so these wires may differ in NaN payloads.
bool SameWire(const CodecSpec& spec, const std::vector<uint8_t>& a, const std::vector<uint8_t>& b,
              size_t numel) {
  if (a == b) return true;
  if (spec.traits().kind != CodecKind::kElements) return false;
  std::vector<float> one(numel), other(numel);
  ScalarBackend().Decode(spec, a.data(), {one.data(), numel});
  ScalarBackend().Decode(spec, b.data(), {other.data(), numel});
  return Same(one, other);
}

// Wire bytes, cut or padded to the length that a receiver knows in advance.
void DecodeAny(const CodecSpec& spec, Input& input) {
  const size_t numel = input.Below(kMostElements);
  const std::span<const uint8_t> given = input.Rest();
  std::vector<uint8_t> wire(EncodedBytes(spec, numel));
  std::copy_n(given.begin(), std::min(given.size(), wire.size()), wire.begin());
  Require(given.size() == wire.size() || !CheckWire(spec, given, numel).ok(),
          "CheckWire refuses another length");
  if (!CheckWire(spec, wire, numel).ok()) return;
  std::vector<float> fast(numel), slow(numel);
  CpuBackend().Decode(spec, wire.data(), {fast.data(), numel});
  ScalarBackend().Decode(spec, wire.data(), {slow.data(), numel});
  Require(Same(fast, slow), "both backends decode the same values");
  CpuBackend().DecodeAdd(spec, wire.data(), fast);
  ScalarBackend().DecodeAdd(spec, wire.data(), slow);
  Require(Same(fast, slow), "both backends add the same values");
}

template <int kSpec>
void Decode(Input& input) {
  DecodeAny(SpecOf(kSpecs[kSpec]), input);
}

void Encode(Input& input) {
  const CodecSpec spec = AnySpec(input);
  const bool feedback = input.Below(2) == 1;
  const Draws draws = {.key = input.Take<uint64_t>(), .stream = input.Take<uint8_t>(), .first = 0};
  std::vector<float> gradient = input.Floats(kMostElements);
  const size_t numel = gradient.size();
  std::vector<float> fast = input.Floats(numel);
  fast.resize(numel);
  std::vector<float> slow = fast;
  std::vector<uint8_t> fast_wire(EncodedBytes(spec, numel)), slow_wire(fast_wire.size());
  const TensorView view{gradient.data(), numel};
  CpuBackend().Encode(spec, view, feedback ? fast.data() : nullptr, fast_wire.data(), draws);
  ScalarBackend().Encode(spec, view, feedback ? slow.data() : nullptr, slow_wire.data(), draws);
  Require(SameWire(spec, fast_wire, slow_wire, numel), "both backends encode the same bytes");
  Require(Same(fast, slow), "both backends keep the same residuals");
  Require(CheckWire(spec, fast_wire, numel).ok(), "what was encoded decodes");
}

void Reduce(Input& input) {
  const CodecSpec up = AnySpec(input), down = AnySpec(input);
  if (up.traits().entries() || down.traits().entries()) return;  // these have no second hop
  const size_t ranks = 1 + input.Below(5);
  const size_t numel = input.Below(kMostElements);
  std::vector<std::vector<uint8_t>> shards(ranks, std::vector<uint8_t>(EncodedBytes(up, numel)));
  std::vector<const uint8_t*> wires;
  for (std::vector<uint8_t>& shard : shards) {
    const std::span<const uint8_t> given = input.TakeBytes(shard.size());
    std::copy(given.begin(), given.end(), shard.begin());
    wires.push_back(shard.data());
  }
  wires[input.Below(static_cast<uint32_t>(ranks))] = nullptr;  // the owner's shard
  std::vector<float> own = input.Floats(numel), residual = input.Floats(numel);
  own.resize(numel);
  residual.resize(numel);
  struct Result {
    std::vector<float> residual, out;
    std::vector<uint8_t> wire;
  };
  const auto reduce = [&](const Backend& backend) {
    Result result{residual, std::vector<float>(numel),
                  std::vector<uint8_t>(EncodedBytes(down, numel))};
    backend.Reduce({.up = up,
                    .down = down,
                    .wires = wires,
                    .own = {own.data(), numel},
                    .scale = 1.0f / static_cast<float>(ranks),
                    .residual = result.residual.data(),
                    .out = {result.out.data(), numel},
                    .wire_out = result.wire.data()});
    return result;
  };
  const Result fast = reduce(CpuBackend()), slow = reduce(ScalarBackend());
  Require(SameWire(down, fast.wire, slow.wire, numel), "both backends reduce to the same bytes");
  Require(Same(fast.residual, slow.residual), "both backends keep the same second-hop residuals");
  Require(Same(fast.out, slow.out), "both backends give the same means");
}

void Spec(Input& input) {
  const absl::StatusOr<CodecPair> pair = CodecPair::Parse(input.RestAsText());
  if (!pair.ok()) return Require(!pair.status().message().empty(), "a refusal has its reason");
  const absl::StatusOr<CodecPair> again = CodecPair::Parse(pair->ToString());
  Require(again.ok() && *again == *pair, "a spec's canonical form is the spec");
}

}  // namespace

const std::vector<Target> kCodecTargets = {
    {"decode_fp32", Decode<0>},
    {"decode_bf16", Decode<1>},
    {"decode_int8", Decode<2>},
    {"decode_int4", Decode<4>},
    {"decode_int4_block", Decode<5>},
    {"decode_int4_hadamard", Decode<6>},
    {"decode_onebit", Decode<7>},
    {"decode_topk", Decode<8>},
    {"decode_adaptive", Decode<9>},
    {"decode_adaptive_floor", Decode<10>},
    {"encode", Encode},
    {"reduce", Reduce},
    {"spec", Spec},
};

}  // namespace thinwire::fuzz
