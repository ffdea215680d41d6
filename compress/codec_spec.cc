#include "compress/codec_spec.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "compress/codec_list.h"

namespace thinwire {
namespace {

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

std::string NearestCodec(std::string_view name) {
  const auto nearest = std::min_element(kCodecs.begin(), kCodecs.end(), [name](auto& a, auto& b) {
    return EditDistance(name, a.name) < EditDistance(name, b.name);
  });
  return std::string(nearest->name);
}

uint32_t NearestBlock(uint32_t wanted) {
  uint32_t nearest = kMinBlock;
  while (nearest < kMaxBlock && wanted >= nearest + nearest / 2) nearest *= 2;
  return nearest;
}

absl::Status ParseBlock(const std::string& value, uint32_t* block) {
  uint32_t parsed = 0;
  if (absl::SimpleAtoi(value, &parsed) && parsed == NearestBlock(parsed)) {
    *block = parsed;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("block=", value, " is out of range, expected a power of two from ", kMinBlock,
                   " to ", kMaxBlock, "; the nearest is block=", NearestBlock(parsed)));
}

absl::Status ParseParameter(const std::string& text, CodecSpec* spec) {
  const std::pair<std::string, std::string> pair = absl::StrSplit(text, absl::MaxSplits('=', 1));
  const CodecInfo& info = InfoOf(spec->id);
  const std::string name(info.name);
  if (info.qmax == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("codec '", name, "' has no parameters, got '", text, "'; write '", name, "'"));
  }
  if (pair.first != "block") {
    return absl::InvalidArgumentError(absl::StrCat("codec '", name, "' has no parameter '",
                                                   pair.first, "'; the nearest is 'block'"));
  }
  return ParseBlock(pair.second, &spec->block);
}

size_t PadTo16(size_t bytes) { return (bytes + 15) / 16 * 16; }

}  // namespace

absl::StatusOr<CodecSpec> CodecSpec::Parse(std::string_view text) {
  const std::pair<std::string, std::string> parts =
      absl::StrSplit(std::string(text), absl::MaxSplits(':', 1));
  const auto info = std::find_if(kCodecs.begin(), kCodecs.end(),
                                 [&](const CodecInfo& codec) { return codec.name == parts.first; });
  if (info == kCodecs.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "unknown codec '", parts.first, "'; the nearest is '", NearestCodec(parts.first), "'"));
  }
  CodecSpec spec{.id = info->id};
  const bool has_parameters = text.find(':') != std::string_view::npos;
  if (!has_parameters) return spec;
  const std::vector<std::string> parameters = absl::StrSplit(parts.second, ',');
  for (const std::string& parameter : parameters) {
    if (absl::Status bad = ParseParameter(parameter, &spec); !bad.ok()) return bad;
  }
  return spec;
}

std::string CodecSpec::ToString() const {
  const std::string name(InfoOf(id).name);
  return block == CodecSpec{}.block ? name : absl::StrCat(name, ":block=", block);
}

ShardLayout LayoutOf(const CodecSpec& spec, size_t numel) {
  const CodecInfo& info = InfoOf(spec.id);
  ShardLayout layout{};
  layout.blocks = info.qmax == 0 ? 0 : (numel + spec.block - 1) / spec.block;
  layout.codes_at = PadTo16(layout.blocks * sizeof(uint16_t));
  layout.codes_bytes = (numel * info.code_bits + 7) / 8;
  layout.bytes = layout.codes_at + PadTo16(layout.codes_bytes);
  return layout;
}

size_t EncodedBytes(const CodecSpec& spec, size_t numel) { return LayoutOf(spec, numel).bytes; }

}  // namespace thinwire
