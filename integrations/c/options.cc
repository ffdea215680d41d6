#include "integrations/c/options.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "integrations/c/border.h"
#include "schedule/collective/settle.h"

namespace thinwire {
namespace {

// The one of `kinds` that is named `text`; the first of them for an empty name.
template <typename Kind>
absl::StatusOr<Kind> ParseKind(const char* what, const char* text,
                               std::initializer_list<Kind> kinds) {
  const std::string_view name = TextOf(text);
  if (name.empty()) return *kinds.begin();
  std::string expected;
  for (const Kind& kind : kinds) {
    if (name == Name(kind)) return kind;
    const char* const between = &kind == kinds.begin()     ? ""
                                : &kind == kinds.end() - 1 ? " or "
                                                           : ", ";
    absl::StrAppend(&expected, between, std::string(Name(kind)));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown ", what, " '", std::string(name), "', expected ", expected));
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

// struct_size from this value on is taken for an uninitialised field; all structs stay far smaller.
constexpr size_t kImplausibleSize = 4096;

// The first release's tw_simulation ended with `steps`, an int that was padded to 8 bytes.
constexpr size_t kFirstSimulationSize = offsetof(tw_simulation, steps) + sizeof(uint64_t);

struct Sizes {
  const char* name;       // of the struct
  size_t first, current;  // bytes in the first release, and in this library
};

absl::Status CopySized(const Sizes& sizes, const void* caller, void* copy) {
  size_t size = 0;
  std::memcpy(&size, caller, sizeof(size));
  if (size < sizes.first || size >= kImplausibleSize || size % alignof(tw_options) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(sizes.name, ".struct_size is ", size, " bytes, expected ", sizes.current,
                     ", or an older release's size of ", sizes.first,
                     " and more; set it to sizeof(", sizes.name, "), as tw_options_init does"));
  }
  const auto* bytes = static_cast<const unsigned char*>(caller);
  if (size > sizes.current &&
      std::any_of(bytes + sizes.current, bytes + size, [](unsigned char b) { return b != 0; })) {
    return absl::InvalidArgumentError(absl::StrCat(
        sizes.name, " has ", size, " bytes, expected ", sizes.current,
        " or zeros behind them: the caller's header is newer than this library, and a field that "
        "the library does not know is set; leave it zero, or load the library of that header"));
  }
  std::memcpy(copy, caller, std::min(size, sizes.current));
  return absl::OkStatus();
}

template <typename Struct>
absl::StatusOr<Struct> ReadSized(const char* name, size_t first, const void* caller) {
  static_assert(sizeof(Struct) < kImplausibleSize);
  if (caller == nullptr) return absl::InvalidArgumentError(absl::StrCat(name, " is null"));
  Struct copy = {};
  if (absl::Status bad = CopySized({name, first, sizeof(Struct)}, caller, &copy); !bad.ok()) {
    return bad;
  }
  copy.struct_size = sizeof(Struct);
  return copy;
}

}  // namespace

absl::StatusOr<tw_options> ReadOptions(const tw_options* caller) {
  return ReadSized<tw_options>("tw_options", kFirstOptionsSize, caller);
}

absl::StatusOr<tw_simulation> ReadSimulation(const tw_simulation* caller) {
  return ReadSized<tw_simulation>("tw_simulation", kFirstSimulationSize, caller);
}

absl::StatusOr<tw_kv_options> ReadKvOptions(const tw_kv_options* caller) {
  return ReadSized<tw_kv_options>("tw_kv_options", sizeof(tw_kv_options), caller);
}

absl::StatusOr<Options> ParseOptions(const tw_options& in) {
  if (in.check_replicas != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "check_replicas is ", in.check_replicas, ", expected 0: engines do not compare results; ",
        "call thinwire.torch.check_replicas(module), or compare tw_digest of the parameters"));
  }
  Options out;
  absl::StatusOr<std::vector<CodecPair>> codecs = ParseCodecs(std::string(TextOf(in.codec)));
  if (!codecs.ok()) return codecs.status();
  const absl::StatusOr<Policy> policy =
      ParseKind("policy", in.policy, {Policy::kWfbp, Policy::kFifo, Policy::kP3});
  if (!policy.ok()) return policy.status();
  const absl::StatusOr<Topology> topology =
      ParseKind("topology", in.topology,
                {Topology::kAuto, Topology::kFlat, Topology::kGrid, Topology::kHierarchical});
  if (!topology.ok()) return topology.status();
  const absl::StatusOr<TransportKind> transport = ParseKind(
      "transport", in.transport,
      {TransportKind::kGloo, TransportKind::kUcx, TransportKind::kNccl, TransportKind::kAuto});
  if (!transport.ok()) return transport.status();
  out.codecs = *codecs;
  out.momentum = {in.momentum, in.nesterov != 0};
  out.policy = *policy;
  out.topology = *topology;
  out.local_size = static_cast<int>(std::min<size_t>(in.local_size, INT_MAX));
  out.transport = *transport;
  if (in.loops != 0) out.loops = static_cast<int>(std::min<size_t>(in.loops, INT_MAX));
  if (in.planned != 0) out.predict = in.planned > 0 ? Predict::kAlways : Predict::kNever;
  if (in.lanes != 0) out.lanes = in.lanes;
  if (in.chunk_bytes != 0) {
    out.chunk_bytes = in.chunk_bytes;
    out.least_message_bytes = 0;  // the caller's chunk_bytes is not enlarged in large worlds
  } else if (out.policy == Policy::kP3) {
    out.chunk_bytes = kOvertakenChunk;
  }
  if (in.min_bytes != 0) out.min_bytes = in.min_bytes;
  if (in.no_raw != 0) out.min_bytes = 0;
  if (in.timeout_ms != 0) out.timeout = std::chrono::milliseconds(in.timeout_ms);
  out.recoverable = in.recoverable != 0;
  out.trace_path = std::string(TextOf(in.trace_path));
  out.checksum = in.checksum != 0;
  out.flight_path = std::string(TextOf(in.flight_path));
  return out;
}

}  // namespace thinwire
