#include "schedule/options.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compress/codec_spec.h"
#include "schedule/collective/settle.h"

namespace thinwire {
namespace {

template <typename Number>
AgreedOption Bounded(const char* name, Number value, Number least, Number most) {
  const bool good = value >= least && value <= most;
  return {name, absl::StrCat(value), good ? "" : absl::StrCat(least, " to ", most)};
}

AgreedOption Codecs(const std::vector<CodecPair>& codecs) {
  std::vector<std::string> specs;
  for (const CodecPair& codec : codecs) specs.push_back(codec.ToString());
  return {"codec", absl::StrJoin(specs, ";"), codecs.empty() ? "at least one" : ""};
}

AgreedOption MomentumBeta(float beta) {
  const bool good = beta >= 0.0f && beta < 1.0f;  // false for NaN
  return {"momentum", absl::StrCat(beta), good ? "" : "0 to below 1"};
}

template <typename Kind>
AgreedOption Named(const char* name, Kind kind) {
  return {name, std::string(Name(kind)), ""};
}

AgreedOption Any(const char* name, size_t value) { return {name, absl::StrCat(value), ""}; }

// Checks the range of the given size; ranks compare the size settled for this world.
AgreedOption ChunkBytes(const Options& options, int world) {
  constexpr size_t kLeast = 4096, kMost = kMostElements * sizeof(float);
  AgreedOption option = Bounded("chunk_bytes", options.chunk_bytes, kLeast, kMost);
  if (option.range.empty()) option.value = absl::StrCat(Settle(options, world)->chunk_bytes);
  return option;
}

}  // namespace

std::vector<AgreedOption> ListAgreed(const Options& options, int world) {
  return {Codecs(options.codecs),
          MomentumBeta(options.momentum.beta),
          Any("nesterov", options.momentum.nesterov),
          Named("policy", options.policy),
          Bounded("lanes", options.lanes, 1, 64),
          ChunkBytes(options, world),
          Any("min_bytes", options.min_bytes),
          Any("one_hop_bytes", options.one_hop_bytes),
          Any("checksum", options.checksum),
          Named("topology", options.topology),
          Any("local_size", options.local_size),
          Named("transport", options.transport),
          Bounded("loops", options.loops, 1, 16)};
}

absl::Status CheckOptions(const Options& options) {
  for (const AgreedOption& option : ListAgreed(options, 1)) {
    if (option.range.empty()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(option.name, " is ", option.value, ", expected ", option.range));
  }
  if (options.timeout <= std::chrono::milliseconds(0)) {
    return absl::InvalidArgumentError("the timeout must be longer than nothing");
  }
  return absl::OkStatus();
}

}  // namespace thinwire
