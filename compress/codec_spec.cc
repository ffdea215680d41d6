#include "compress/codec_spec.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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

std::string Nearest(std::string_view wanted, const std::vector<std::string>& names) {
  return *std::min_element(names.begin(), names.end(), [&](auto& a, auto& b) {
    return EditDistance(wanted, a) < EditDistance(wanted, b);
  });
}

std::vector<std::string> CodecNames() {
  std::vector<std::string> names;
  for (const CodecInfo& codec : kCodecs) names.emplace_back(codec.name);
  return names;
}

std::vector<std::string> ParametersOf(CodecId id) {
  return absl::StrSplit(std::string(InfoOf(id).parameters), ',', absl::SkipEmpty());
}

absl::Status OutOfRange(std::string_view key, const std::string& value, const std::string& expected,
                        const std::string& nearest) {
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(key), "=", value, " is out of range, expected ", expected,
                   "; the nearest is ", std::string(key), "=", nearest));
}

uint32_t NearestBlock(uint32_t wanted) {
  uint32_t nearest = kMinBlock;
  while (nearest < kMaxBlock && wanted >= nearest + nearest / 2) nearest *= 2;
  return nearest;
}

absl::Status ParseBlock(const std::string& value, CodecSpec* spec) {
  uint32_t parsed = 0;
  if (absl::SimpleAtoi(value, &parsed) && parsed == NearestBlock(parsed)) {
    spec->block = parsed;
    return absl::OkStatus();
  }
  return OutOfRange("block", value,
                    absl::StrCat("a power of two from ", kMinBlock, " to ", kMaxBlock),
                    absl::StrCat(NearestBlock(parsed)));
}

absl::Status ParseRounding(const std::string& value, CodecSpec* spec) {
  if (value != "nearest" && value != "stochastic") {
    return OutOfRange("rounding", value, "nearest or stochastic",
                      Nearest(value, {"nearest", "stochastic"}));
  }
  spec->rounding = value == "nearest" ? Rounding::kNearest : Rounding::kStochastic;
  return absl::OkStatus();
}

absl::Status ParseFlag(const std::string& key, const std::string& value, bool* flag) {
  if (value != "0" && value != "1") return OutOfRange(key, value, "0 or 1", "1");
  *flag = value == "1";
  return absl::OkStatus();
}

absl::Status ParseSeed(const std::string& value, CodecSpec* spec) {
  if (absl::SimpleAtoi(value, &spec->seed)) return absl::OkStatus();
  return OutOfRange("seed", value, "a whole number from 0 to 2^64 - 1", "0");
}

// Held in millionths: k must be the same number on every rank and machine.
absl::Status ParseDensity(const std::string& value, CodecSpec* spec) {
  double parsed = 0;
  const bool number = absl::SimpleAtod(value, &parsed) && std::isfinite(parsed);
  const double millionths = std::round(std::clamp(number ? parsed : 0.01, 1e-6, 1.0) * 1e6);
  if (!number || millionths != std::round(parsed * 1e6)) {
    return OutOfRange("density", value, "0.000001 to 1", absl::StrCat(millionths * 1e-6));
  }
  spec->density_ppm = static_cast<uint32_t>(millionths);
  return absl::OkStatus();
}

absl::Status ParseWarmup(const std::string& value, CodecSpec* spec) {
  if (absl::SimpleAtoi(value, &spec->warmup)) return absl::OkStatus();
  return OutOfRange("warmup", value, "a number of steps from 0 to 4294967295", "0");
}

absl::Status ParseParameter(const std::string& text, CodecSpec* spec) {
  const std::pair<std::string, std::string> pair = absl::StrSplit(text, absl::MaxSplits('=', 1));
  const auto& [key, value] = pair;
  const std::string name(InfoOf(spec->id).name);
  const std::vector<std::string> known = ParametersOf(spec->id);
  if (known.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("codec '", name, "' has no parameters, got '", text, "'; write '", name, "'"));
  }
  if (std::find(known.begin(), known.end(), key) == known.end()) {
    return absl::InvalidArgumentError(absl::StrCat("codec '", name, "' has no parameter '", key,
                                                   "'; the nearest is '", Nearest(key, known),
                                                   "'"));
  }
  if (key == "block") return ParseBlock(value, spec);
  if (key == "rounding") return ParseRounding(value, spec);
  if (key == "hadamard") return ParseFlag(key, value, &spec->hadamard);
  if (key == "seed") return ParseSeed(value, spec);
  if (key == "masking") return ParseFlag(key, value, &spec->masking);
  if (key == "density") return ParseDensity(value, spec);
  return ParseWarmup(value, spec);
}

// "down=..." at the front or behind a comma; it takes the rest of the text.
size_t FindDown(std::string_view text) {
  for (const std::string_view mark : {":down=", ",down="}) {
    const size_t at = text.find(mark);
    if (at != std::string_view::npos) return at;
  }
  return std::string_view::npos;
}

CodecSpec DefaultDown(const CodecSpec& up) {
  if (up.id != CodecId::kOneBit) return up;
  return {.id = CodecId::kInt4, .block = up.block};
}

}  // namespace

absl::StatusOr<CodecSpec> CodecSpec::Parse(std::string_view text) {
  const std::pair<std::string, std::string> parts =
      absl::StrSplit(std::string(text), absl::MaxSplits(':', 1));
  const auto info = std::find_if(kCodecs.begin(), kCodecs.end(),
                                 [&](const CodecInfo& codec) { return codec.name == parts.first; });
  if (info == kCodecs.end()) {
    return absl::InvalidArgumentError(absl::StrCat("unknown codec '", parts.first,
                                                   "'; the nearest is '",
                                                   Nearest(parts.first, CodecNames()), "'"));
  }
  CodecSpec spec{.id = info->id};
  const bool has_parameters = text.find(':') != std::string_view::npos;
  if (!has_parameters) return spec;
  const std::vector<std::string> parameters = absl::StrSplit(parts.second, ',');
  for (const std::string& parameter : parameters) {
    if (absl::Status bad = ParseParameter(parameter, &spec); !bad.ok()) return bad;
  }
  if (spec.hadamard && spec.block != CodecSpec{}.block) {
    return absl::InvalidArgumentError(
        absl::StrCat("hadamard=1 transforms 256 elements at once, got block=", spec.block,
                     "; leave the block out"));
  }
  return spec;
}

std::string CodecSpec::ToString() const {
  const CodecSpec standard{};
  std::vector<std::string> parameters;
  if (block != standard.block) parameters.push_back(absl::StrCat("block=", block));
  if (rounding == Rounding::kStochastic) parameters.push_back("rounding=stochastic");
  if (hadamard) parameters.push_back("hadamard=1");
  if (seed != standard.seed) parameters.push_back(absl::StrCat("seed=", seed));
  if (density_ppm != standard.density_ppm) {
    parameters.push_back(absl::StrCat("density=", 1e-6 * density_ppm));
  }
  if (warmup != standard.warmup) parameters.push_back(absl::StrCat("warmup=", warmup));
  if (!masking) parameters.push_back("masking=0");
  const std::string name(InfoOf(id).name);
  if (parameters.empty()) return name;
  return absl::StrCat(name, ":", absl::StrJoin(parameters, ","));
}

CodecSpec CodecSpec::AtStep(uint64_t step) const {
  if (step >= warmup) return *this;
  constexpr uint32_t kFirstPpm = 250000;
  uint64_t stages = 0;
  while (kFirstPpm >> (2 * stages) > density_ppm) ++stages;
  CodecSpec now = *this;
  now.density_ppm = std::max(density_ppm, kFirstPpm >> (2 * (step * stages / warmup)));
  return now;
}

absl::StatusOr<CodecPair> CodecPair::Parse(std::string_view text) {
  constexpr size_t kMark = sizeof(",down=") - 1;
  const size_t at = FindDown(text);
  const absl::StatusOr<CodecSpec> up = CodecSpec::Parse(text.substr(0, at));
  if (!up.ok()) return up.status();
  if (at == std::string_view::npos) return CodecPair{*up, DefaultDown(*up)};
  const absl::StatusOr<CodecSpec> down = CodecSpec::Parse(text.substr(at + kMark));
  if (!down.ok()) return down.status();
  if (up->id == CodecId::kTopK || down->id == CodecId::kTopK) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", std::string(text),
                     "': topk has no second hop, every rank gets all entries; leave down= out"));
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
  return InfoOf(up.id).kind != CodecKind::kElements || InfoOf(down.id).kind != CodecKind::kElements;
}

}  // namespace thinwire
