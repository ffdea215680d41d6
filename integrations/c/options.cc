#include "integrations/c/options.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace thinwire {
namespace {

std::string TextOf(const char* text) { return text == nullptr ? "" : text; }

absl::StatusOr<Policy> ParsePolicy(const std::string& name) {
  if (name.empty()) return Policy::kWfbp;
  for (const Policy policy : {Policy::kFifo, Policy::kWfbp, Policy::kP3}) {
    if (name == Name(policy)) return policy;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown policy '", name, "', expected fifo, wfbp or p3"));
}

absl::StatusOr<std::vector<CodecPair>> ParseCodecs(const std::string& specs) {
  const std::vector<std::string> texts = absl::StrSplit(specs.empty() ? "int4" : specs, ';');
  std::vector<CodecPair> codecs;
  for (const std::string& text : texts) {
    const absl::StatusOr<CodecPair> codec = CodecPair::Parse(text);
    if (!codec.ok()) return codec.status();
    codecs.push_back(*codec);
  }
  return codecs;
}

}  // namespace

absl::StatusOr<Options> ParseOptions(const tw_options& in) {
  Options out;
  absl::StatusOr<std::vector<CodecPair>> codecs = ParseCodecs(TextOf(in.codec));
  if (!codecs.ok()) return codecs.status();
  absl::StatusOr<Policy> policy = ParsePolicy(TextOf(in.policy));
  if (!policy.ok()) return policy.status();
  out.codecs = *codecs;
  out.momentum = {in.momentum, in.nesterov != 0};
  out.policy = *policy;
  if (in.planned != 0) out.foresee = in.planned > 0 ? Foresee::kAlways : Foresee::kNever;
  if (in.lanes != 0) out.lanes = in.lanes;
  if (in.chunk_bytes != 0) out.chunk_bytes = in.chunk_bytes;
  if (in.min_bytes != 0) out.min_bytes = in.min_bytes;
  if (in.no_raw != 0) out.min_bytes = 0;
  if (in.timeout_ms != 0) out.timeout = std::chrono::milliseconds(in.timeout_ms);
  out.trace_path = TextOf(in.trace_path);
  return out;
}

}  // namespace thinwire
