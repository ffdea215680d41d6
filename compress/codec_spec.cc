#include "compress/codec_spec.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "compress/backend.h"
#include "compress/codec_info.h"

namespace thinwire {
namespace {

std::vector<std::string> CodecNames() {
  std::vector<std::string> names;
  for (const CodecTraits& codec : kCodecs) names.emplace_back(codec.name);
  return names;
}

std::vector<std::string> KeysOf(const CodecInfo& info) {
  std::vector<std::string> keys;
  for (const ParameterInfo* parameter : info.parameters) keys.emplace_back(parameter->key);
  return keys;
}

absl::Status ParseParameter(const std::string& text, CodecSpec* spec) {
  const std::pair<std::string, std::string> pair = absl::StrSplit(text, absl::MaxSplits('=', 1));
  const auto& [key, value] = pair;
  const CodecInfo& info = InfoOf(spec->id);
  const std::string name(info.traits.name);
  if (info.parameters.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("codec '", name, "' has no parameters, got '", text, "'; write '", name, "'"));
  }
  const ParameterInfo* const parameter = info.FindParameter(key);
  if (parameter == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("codec '", name, "' has no parameter '", key,
                                                   "'; the nearest is '",
                                                   NearestOf(key, KeysOf(info)), "'"));
  }
  const std::optional<std::string> nearest = parameter->parse(value, spec);
  if (!nearest.has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(key, "=", value, " is out of range, expected ",
                                                 parameter->range, "; the nearest is ", key, "=",
                                                 *nearest));
}

// Finds "down=..." at the front or after a comma; it takes the rest of the text.
size_t FindDown(std::string_view text) {
  for (const std::string_view mark : {":down=", ",down="}) {
    const size_t at = text.find(mark);
    if (at != std::string_view::npos) return at;
  }
  return std::string_view::npos;
}

CodecSpec DefaultDown(const CodecSpec& up) {
  const CodecInfo& info = InfoOf(up.id);
  return info.default_down == nullptr ? up : info.default_down(up);
}

MomentumNeed MomentumOf(const CodecSpec& spec) {
  const CodecInfo& info = InfoOf(spec.id);
  return info.momentum == nullptr ? MomentumNeed::kUnused : info.momentum(spec);
}

}  // namespace

absl::StatusOr<CodecSpec> CodecSpec::Parse(std::string_view text) {
  const std::pair<std::string, std::string> parts =
      absl::StrSplit(std::string(text), absl::MaxSplits(':', 1));
  const auto traits = std::find_if(kCodecs.begin(), kCodecs.end(), [&](const CodecTraits& codec) {
    return codec.name == parts.first;
  });
  if (traits == kCodecs.end()) {
    return absl::InvalidArgumentError(absl::StrCat("unknown codec '", parts.first,
                                                   "'; the nearest is '",
                                                   NearestOf(parts.first, CodecNames()), "'"));
  }
  CodecSpec spec{.id = traits->id};
  const bool has_parameters = text.find(':') != std::string_view::npos;
  if (!has_parameters) return spec;
  const std::vector<std::string> parameters = absl::StrSplit(parts.second, ',');
  for (const std::string& parameter : parameters) {
    if (absl::Status bad = ParseParameter(parameter, &spec); !bad.ok()) return bad;
  }
  const CodecInfo& info = InfoOf(spec.id);
  if (info.check != nullptr) {
    if (absl::Status bad = info.check(spec); !bad.ok()) return bad;
  }
  return spec;
}

std::string CodecSpec::ToString() const {
  const CodecInfo& info = InfoOf(id);
  std::vector<std::string> parameters;
  for (const ParameterInfo* parameter : info.parameters) {
    const std::string value = parameter->print(*this);
    if (value == parameter->print({.id = id})) continue;
    parameters.push_back(absl::StrCat(parameter->key, "=", value));
  }
  const std::string name(info.traits.name);
  if (parameters.empty()) return name;
  return absl::StrCat(name, ":", absl::StrJoin(parameters, ","));
}

CodecSpec CodecSpec::AtStep(uint64_t step) const {
  const CodecInfo& info = InfoOf(id);
  return info.at_step == nullptr ? *this : info.at_step(*this, step);
}

absl::StatusOr<CodecPair> CodecPair::Parse(std::string_view text) {
  constexpr size_t kMark = sizeof(",down=") - 1;
  const size_t at = FindDown(text);
  const absl::StatusOr<CodecSpec> up = CodecSpec::Parse(text.substr(0, at));
  if (!up.ok()) return up.status();
  if (at == std::string_view::npos) return CodecPair{*up, DefaultDown(*up)};
  const absl::StatusOr<CodecSpec> down = CodecSpec::Parse(text.substr(at + kMark));
  if (!down.ok()) return down.status();
  for (const CodecSpec& spec : {*up, *down}) {
    if (!spec.traits().entries()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("'", std::string(text), "': ", std::string(spec.traits().name),
                     " has no second hop, every rank gets all entries; leave down= out"));
  }
  return CodecPair{*up, *down};
}

std::string CodecPair::ToString() const {
  const std::string first = up.ToString();
  if (down == DefaultDown(up)) return first;
  return absl::StrCat(first, first.find(':') == std::string::npos ? ":" : ",",
                      "down=", down.ToString());
}

bool CodecPair::uses_feedback() const {
  return up.traits().uses_feedback() || down.traits().uses_feedback();
}

MomentumNeed CodecPair::momentum() const { return std::max(MomentumOf(up), MomentumOf(down)); }

// Devices have no stochastic rounding.
bool CodecPair::has_kernels() const {
  const auto runs = [](const CodecSpec& spec) {
    return spec.traits().has_kernels && spec.rounding == Rounding::kNearest;
  };
  return runs(up) && runs(down);
}

// Entries go to every rank, so above a density of 1/4 over the ranks a dense int4, which goes to
// owners and back, takes fewer bytes: 4 k (n - 1) against about 2 N (n - 1) / n * 4.06 / 8.
CodecPair CodecPair::ForWorld(int size) const {
  constexpr uint64_t kDensest = 250000;
  if (!up.traits().entries() || uint64_t{up.density_ppm} * size <= kDensest) return *this;
  const CodecSpec dense{.id = codecs::Int4::kTraits.id};
  return {dense, dense};
}

CodecSpec LosslessSpec(DType dtype) {
  return {.id = dtype == DType::kBF16 ? codecs::Bf16::kTraits.id : codecs::Fp32::kTraits.id};
}

absl::Status CheckElements(size_t numel) {
  if (numel <= kMostElements) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("got ", numel, " elements, expected at most ", kMostElements));
}

absl::Status CheckWire(const CodecSpec& spec, Bytes wire, size_t numel) {
  const size_t expected = EncodedBytes(spec, numel);
  if (wire.size() != expected) {
    return absl::InvalidArgumentError(absl::StrCat(numel, " elements of ", spec.ToString(),
                                                   ": expected ", expected, " bytes, got ",
                                                   wire.size()));
  }
  const CodecInfo& info = InfoOf(spec.id);
  if (info.check_wire == nullptr) return absl::OkStatus();
  return info.check_wire(spec, wire.data(), numel);
}

}  // namespace thinwire
