#include "compress/codecs/parameters.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "compress/nearest.h"

namespace thinwire::codecs {
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
  if (!absl::SimpleAtoi(value, &parsed)) return absl::StrCat(parsed);  // saturated at the ends
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

}  // namespace thinwire::codecs
