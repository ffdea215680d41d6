#include "compress/codecs/topk.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "compress/backend.h"
#include "compress/codec_info.h"
#include "compress/codecs/reference.h"
#include "compress/simd_kernels.h"
#include "compress/types.h"

namespace thinwire::codecs {
namespace {

// Parameters.

// Stored in millionths: k must be the same number on every rank and machine.
std::optional<std::string> ParseDensity(const std::string& value, CodecSpec* spec) {
  double parsed = 0;
  const bool number = absl::SimpleAtod(value, &parsed) && std::isfinite(parsed);
  const double millionths = std::round(std::clamp(number ? parsed : 0.01, 1e-6, 1.0) * 1e6);
  if (!number || millionths != std::round(parsed * 1e6)) return absl::StrCat(millionths * 1e-6);
  spec->density_ppm = static_cast<uint32_t>(millionths);
  return std::nullopt;
}

std::optional<std::string> ParseWarmup(const std::string& value, CodecSpec* spec) {
  uint32_t parsed = 0;
  if (!absl::SimpleAtoi(value, &parsed)) return "0";
  spec->warmup = parsed;
  return std::nullopt;
}

constexpr ParameterInfo kDensity = {
    .key = "density",
    .range = "0.000001 to 1",
    .help = "The part of the elements that is sent.",
    .parse = ParseDensity,
    .print = [](const CodecSpec& spec) { return absl::StrCat(1e-6 * spec.density_ppm); }};
constexpr ParameterInfo kWarmup = {
    .key = "warmup",
    .range = "a number of steps from 0 to 4294967295",
    .help = "Steps in which the density goes from a quarter down to the one given.",
    .parse = ParseWarmup,
    .print = [](const CodecSpec& spec) { return absl::StrCat(spec.warmup); }};
constexpr ParameterInfo kMasking = {
    .key = "masking",
    .range = "0 or 1",
    .help = "Whether the local momentum of an element is zeroed when the element is sent.",
    .parse = [](const std::string& value,
                CodecSpec* spec) { return ParseFlag(value, &spec->masking); },
    .print = [](const CodecSpec& spec) -> std::string { return spec.masking ? "1" : "0"; }};

constexpr const ParameterInfo* kParameters[] = {&kDensity, &kWarmup, &kMasking};

// DGC's schedule, Lin et al., arXiv 1712.01887, section 3.3: the density is divided by 4 each time.
CodecSpec AtStep(const CodecSpec& spec, uint64_t step) {
  if (step >= spec.warmup) return spec;
  constexpr uint32_t kFirstPpm = 250000;
  uint64_t stages = 0;
  while (kFirstPpm >> (2 * stages) > spec.density_ppm) ++stages;
  CodecSpec now = spec;
  now.density_ppm = std::max(spec.density_ppm, kFirstPpm >> (2 * (step * stages / spec.warmup)));
  return now;
}

// DGC's momentum correction is needed below one percent.
MomentumNeed Momentum(const CodecSpec& spec) {
  return spec.density_ppm < 10000 ? MomentumNeed::kAdvised : MomentumNeed::kHelps;
}

// Wire bytes.

// Indices ascend within a sub-block, so no element has two entries.
bool Ascend(const uint8_t* entries, size_t count, size_t elements) {
  for (size_t i = 0; i < count; ++i) {
    const size_t index = EntryIndex(Get<uint32_t>(entries, i));
    if (index >= elements || (i > 0 && index <= EntryIndex(Get<uint32_t>(entries, i - 1))))
      return false;
  }
  return true;
}

absl::Status CheckWire(const CodecSpec& spec, const uint8_t* wire, size_t numel) {
  const ShardLayout layout = LayoutOf(spec, numel);
  const size_t expected = EntryCount(spec.density_ppm, numel);
  size_t seen = 0;
  for (size_t b = 0; b < layout.blocks; ++b) {
    const size_t count = Get<uint32_t>(wire, b);
    const size_t elements = std::min(kSubBlock, numel - b * kSubBlock);
    if (count > expected - seen) {
      return absl::InvalidArgumentError(
          absl::StrCat("topk counts more than the ", expected, " entries of ", numel, " elements"));
    }
    if (!Ascend(wire + layout.codes_at + seen * sizeof(uint32_t), count, elements)) {
      return absl::InvalidArgumentError(absl::StrCat("the places of the topk entries of sub-block ",
                                                     b, " do not ascend below ", elements));
    }
    seen += count;
  }
  if (seen == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("topk counts add up to ", seen, ", expected ", expected));
}

// Calls visit(element, value) for every entry of a checked shard.
template <typename Visit>
void ForEachEntry(const CodecSpec& spec, const uint8_t* wire, size_t numel, Visit visit) {
  const ShardLayout layout = LayoutOf(spec, numel);
  const uint8_t* entries = wire + layout.codes_at;
  for (size_t b = 0; b < layout.blocks; ++b) {
    const size_t count = Get<uint32_t>(wire, b);
    for (size_t i = 0; i < count; ++i) {
      const uint32_t entry = Get<uint32_t>(entries, i);
      visit(b * kSubBlock + EntryIndex(entry), EntryValue(entry));
    }
    entries += count * sizeof(uint32_t);
  }
}

// The reference: sorts all elements and takes the first k.

void EncodeReference(const CodecSpec& spec, const EncodeArgs& args) {
  const auto& [gradient, residual, wire, draws, threshold, momentum] = args;
  const size_t numel = gradient.numel;
  std::vector<float> x(numel), u(numel);
  for (size_t i = 0; i < numel; ++i) {
    x[i] = Load(gradient, i);
    if (momentum.velocity != nullptr) {
      u[i] = momentum.beta * Get<float>(momentum.velocity, i) + x[i];
      x[i] = momentum.nesterov ? x[i] + momentum.beta * u[i] : u[i];
    }
    if (residual != nullptr) x[i] = Get<float>(residual, i) + x[i];
  }
  std::vector<size_t> order(numel);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return SelectionKey(x[a]) > SelectionKey(x[b]); });
  order.resize(EntryCount(spec.density_ppm, numel));
  std::sort(order.begin(), order.end());
  if (residual != nullptr) {
    for (size_t i = 0; i < numel; ++i) {
      if (!StoresResidual(x[i])) continue;
      Put(residual, i, x[i]);
      if (momentum.velocity != nullptr) Put(momentum.velocity, i, u[i]);
    }
  }
  const ShardLayout layout = LayoutOf(spec, numel);
  std::memset(wire, 0, layout.head_bytes);
  uint8_t* entries = wire + layout.codes_at;
  for (size_t e = 0; e < order.size(); ++e) {
    const size_t i = order[e];
    const uint32_t entry = EntryOf(x[i], i);
    Put(entries, e, entry);
    Put(wire, i / kSubBlock, Get<uint32_t>(wire, i / kSubBlock) + 1);
    if (residual == nullptr || !StoresResidual(x[i])) continue;
    Put(residual, i, x[i] - EntryValue(entry));
    if (momentum.velocity != nullptr && spec.masking) Put(momentum.velocity, i, 0.0f);
  }
}

std::vector<float> ReferenceValues(const CodecSpec& spec, const uint8_t* wire, size_t numel) {
  std::vector<float> values(numel);
  ForEachEntry(spec, wire, numel, [&](size_t i, float value) { values[i] = value; });
  return values;
}

void DecodeReference(const CodecSpec& spec, const uint8_t* wire, const TensorView& out) {
  const std::vector<float> values = ReferenceValues(spec, wire, out.numel);
  for (size_t i = 0; i < out.numel; ++i) Store(out, i, values[i]);
}

// Only entries are added: an element without an entry is unchanged, even a -0.
void AddReference(const CodecSpec& spec, const uint8_t* wire, float factor, std::span<float> sum) {
  const std::vector<float> values = ReferenceValues(spec, wire, sum.size());
  for (size_t i = 0; i < sum.size(); ++i) {
    if (values[i] == 0.0f) continue;
    Put(sum.data(), i, Get<float>(sum.data(), i) + factor * values[i]);
  }
}

// The SIMD operations; topk_encode.cc has the encoding.

void Decode(const CodecSpec& spec, const uint8_t* wire, const TensorView& out) {
  auto* bytes = static_cast<uint8_t*>(out.data);
  std::fill(bytes, bytes + out.bytes(), uint8_t{0});  // `out` may be empty and at no address
  ForEachEntry(spec, wire, out.numel,
               [&](size_t i, float value) { FromFloats(&value, out.Slice(i, 1)); });
}

void Add(const CodecSpec& spec, const uint8_t* wire, float factor, std::span<float> sum) {
  ForEachEntry(spec, wire, sum.size(), [&](size_t i, float value) {
    Put(sum.data(), i, Get<float>(sum.data(), i) + factor * value);
  });
}

}  // namespace

const CodecInfo& TopK::Info() {
  static constexpr CodecInfo info = {
      .traits = kTraits,
      .help = "The elements of largest magnitude, to every rank: for very slow links.",
      .parameters = kParameters,
      .scalar = {.encode_entries = EncodeReference,
                 .decode_entries = DecodeReference,
                 .add_entries = AddReference},
      .simd = {.encode_entries = TopK::Encode, .decode_entries = Decode, .add_entries = Add},
      .check_wire = CheckWire,
      .at_step = AtStep,
      .momentum = Momentum};
  return info;
}

}  // namespace thinwire::codecs
