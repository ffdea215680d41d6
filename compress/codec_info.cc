#include "compress/codec_info.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "compress/codec_list.h"
#include "compress/codecs/adaptive.h"

namespace thinwire {
namespace {

template <typename... Codecs>
const CodecInfo& InfoIn(CodecTypes<Codecs...>, CodecId id) {
  static const std::array<const CodecInfo*, sizeof...(Codecs)> infos = {&Codecs::Info()...};
  return *infos[static_cast<size_t>(id)];
}

constexpr bool IdsAreIndices() {
  for (size_t i = 0; i < kCodecs.size(); ++i) {
    if (static_cast<size_t>(kCodecs[i].id) != i) return false;
  }
  return true;
}
static_assert(IdsAreIndices(), "a codec's id is its index in compress/codec_list.h");

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, replaced}));
    }
  }
  return row[b.size()];
}

size_t PadTo16(size_t bytes) { return (bytes + 15) / 16 * 16; }

size_t Quotient(size_t numel, size_t unit) { return (numel + unit - 1) / unit; }

}  // namespace

ShardLayout LayoutOf(const CodecSpec& spec, size_t numel) {
  const CodecTraits& traits = spec.traits();
  ShardLayout layout{};
  size_t code_bits = numel * traits.code_bits;
  switch (traits.kind) {
    case CodecKind::kElements: break;
    case CodecKind::kBlocks:
      layout.blocks = Quotient(numel, spec.block);
      layout.head_bytes = layout.blocks * sizeof(uint16_t);
      break;
    case CodecKind::kEntries:
      layout.blocks = Quotient(numel, kSubBlock);
      layout.head_bytes = layout.blocks * sizeof(uint32_t);
      code_bits = EntryCount(spec.density_ppm, numel) * traits.code_bits;
      break;
    case CodecKind::kWidths:
      layout.blocks = Quotient(numel, kTransform);
      layout.head_bytes = layout.blocks * sizeof(uint16_t);
      code_bits = AdaptivePlanes(spec.sixteenths, layout.blocks) * kTransform;
      break;
  }
  layout.codes_at = PadTo16(layout.head_bytes);
  layout.codes_bytes = (code_bits + 7) / 8;
  layout.bytes = layout.codes_at + PadTo16(layout.codes_bytes);
  return layout;
}

void ZeroPadding(const ShardLayout& layout, uint8_t* wire) {
  std::memset(wire + layout.head_bytes, 0, layout.codes_at - layout.head_bytes);
  const size_t end = layout.codes_at + layout.codes_bytes;
  std::memset(wire + end, 0, layout.bytes - end);
}

size_t EncodedBytes(const CodecSpec& spec, size_t numel) { return LayoutOf(spec, numel).bytes; }

const CodecInfo& InfoOf(CodecId id) { return InfoIn(AllCodecs(), id); }

const ParameterInfo* CodecInfo::FindParameter(std::string_view key) const {
  const auto found = std::find_if(parameters.begin(), parameters.end(),
                                  [&](const ParameterInfo* one) { return one->key == key; });
  return found == parameters.end() ? nullptr : *found;
}

std::string NearestOf(std::string_view wanted, const std::vector<std::string>& names) {
  return *std::min_element(names.begin(), names.end(), [&](auto& a, auto& b) {
    return EditDistance(wanted, a) < EditDistance(wanted, b);
  });
}

namespace codecs {
namespace {

uint32_t NearestBlock(uint32_t wanted) {
  uint32_t nearest = kMinBlock;
  while (nearest < kMaxBlock && wanted >= nearest + nearest / 2) nearest *= 2;
  return nearest;
}

std::optional<std::string> ParseBlock(const std::string& value, CodecSpec* spec) {
  uint32_t parsed = 0;
  if (!absl::SimpleAtoi(value, &parsed) || parsed != NearestBlock(parsed)) {
    return absl::StrCat(NearestBlock(parsed));
  }
  spec->block = parsed;
  return std::nullopt;
}

std::optional<std::string> ParseRounding(const std::string& value, CodecSpec* spec) {
  if (value != "nearest" && value != "stochastic")
    return NearestOf(value, {"nearest", "stochastic"});
  spec->rounding = value == "nearest" ? Rounding::kNearest : Rounding::kStochastic;
  return std::nullopt;
}

std::optional<std::string> ParseSeed(const std::string& value, CodecSpec* spec) {
  uint64_t parsed = 0;
  if (!absl::SimpleAtoi(value, &parsed)) return absl::StrCat(parsed);  // saturated if out of range
  spec->seed = parsed;
  return std::nullopt;
}

}  // namespace

const ParameterInfo kBlock = {
    .key = "block",
    .range = "a power of two from 128 to 4096",
    .help = "Elements that share one scale.",
    .parse = ParseBlock,
    .print = [](const CodecSpec& spec) { return absl::StrCat(spec.block); }};
static_assert(kMinBlock == 128 && kMaxBlock == 4096, "the range of `block` says so");

const ParameterInfo kRounding = {.key = "rounding",
                                 .range = "nearest or stochastic",
                                 .help = "How codes are rounded; stochastic rounding is unbiased.",
                                 .parse = ParseRounding,
                                 .print = [](const CodecSpec& spec) -> std::string {
                                   return spec.rounding == Rounding::kNearest ? "nearest"
                                                                              : "stochastic";
                                 }};

const ParameterInfo kSeed = {
    .key = "seed",
    .range = "a whole number from 0 to 2^64 - 1",
    .help = "The seed of stochastic rounding and of the transform's signs.",
    .parse = ParseSeed,
    .print = [](const CodecSpec& spec) { return absl::StrCat(spec.seed); }};

std::optional<std::string> ParseFlag(const std::string& value, bool* flag) {
  if (value != "0" && value != "1") return "1";
  *flag = value == "1";
  return std::nullopt;
}

}  // namespace codecs
}  // namespace thinwire
