// The functions that need no communicator: information about codecs (compress/codec_info.h), and
// encoding and decoding of shards (compress/FORMAT.md).
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "compress/backend.h"
#include "compress/codec_info.h"
#include "compress/codec_spec.h"
#include "compress/weighted_mean.h"
#include "integrations/c/border.h"
#include "schedule/hash.h"

using thinwire::CodecPair;
using thinwire::CodecSpec;
using thinwire::ToC;

namespace {

absl::StatusOr<CodecPair> Parse(const char* spec) {
  if (spec == nullptr) return absl::InvalidArgumentError("the spec is null");
  return CodecPair::Parse(spec);
}

// The first hop's codec of a spec. InvalidArgument if n is above the limit of elements.
absl::StatusOr<CodecSpec> ParseFor(const char* spec, size_t n) {
  const absl::StatusOr<CodecPair> parsed = Parse(spec);
  if (!parsed.ok()) return parsed.status();
  if (absl::Status bad = thinwire::CheckElements(n); !bad.ok()) return bad;
  return parsed->up;
}

absl::Status TooSmall(const char* what, size_t expected, size_t got) {
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": expected ", expected, " bytes, got ", got));
}

thinwire::TensorView View(const float* x, size_t n) { return {const_cast<float*>(x), n}; }

template <size_t kCapacity>
void CopyText(const std::string& text, char (&to)[kCapacity]) {
  const size_t length = std::min(text.size(), kCapacity - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

// Copies to->struct_size bytes at most: a caller with an older header has fewer fields.
template <typename Struct>
absl::Status Give(Struct made, const char* what, Struct* to) {
  if (to == nullptr || to->struct_size < sizeof(size_t)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " is null or without its struct_size; set it to sizeof(", what, ")"));
  }
  made.struct_size = to->struct_size;
  std::memcpy(to, &made, std::min(to->struct_size, sizeof(Struct)));
  return absl::OkStatus();
}

double BitsOfElement(const CodecSpec& spec) {
  constexpr size_t kLarge = size_t{1} << 24;
  return 8.0 * static_cast<double>(thinwire::EncodedBytes(spec, kLarge)) / kLarge;
}

static_assert(int{TW_MOMENTUM_UNUSED} == int(thinwire::MomentumNeed::kUnused) &&
              int{TW_MOMENTUM_REQUIRED} == int(thinwire::MomentumNeed::kRequired));

}  // namespace

extern "C" {

const char* tw_codec_name(size_t index) {
  return index < thinwire::kCodecs.size() ? thinwire::kCodecs[index].name.data() : nullptr;
}

tw_status tw_codec_info(const char* spec, tw_codec* codec) {
  const absl::StatusOr<CodecPair> pair = Parse(spec);
  if (!pair.ok()) return ToC(pair.status());
  const thinwire::CodecInfo& info = thinwire::InfoOf(pair->up.id);
  tw_codec made{};
  made.name = info.traits.name.data();
  made.help = info.help;
  CopyText(pair->ToString(), made.spec);
  CopyText(pair->up.ToString(), made.up);
  CopyText(pair->down.ToString(), made.down);
  made.up_bits = BitsOfElement(pair->up);
  made.down_bits = BitsOfElement(pair->down);
  made.entries = info.traits.entries();
  made.uses_feedback = pair->uses_feedback();
  made.has_kernels = pair->has_kernels();
  made.momentum = static_cast<tw_momentum_need>(pair->momentum());
  made.num_parameters = info.parameters.size();
  return ToC(Give(made, "tw_codec", codec));
}

tw_status tw_codec_parameter(const char* spec, size_t index, tw_parameter* parameter) {
  const absl::StatusOr<CodecPair> pair = Parse(spec);
  if (!pair.ok()) return ToC(pair.status());
  const thinwire::CodecInfo& info = thinwire::InfoOf(pair->up.id);
  if (index >= info.parameters.size()) {
    return ToC(absl::InvalidArgumentError(absl::StrCat("codec '", info.traits.name.data(), "' has ",
                                                       info.parameters.size(),
                                                       " parameters, got index ", index)));
  }
  const thinwire::ParameterInfo& one = *info.parameters[index];
  tw_parameter made{};
  made.key = one.key;
  made.range = one.range;
  made.help = one.help;
  CopyText(one.print({.id = pair->up.id}), made.default_value);
  CopyText(one.print(pair->up), made.value);
  return ToC(Give(made, "tw_parameter", parameter));
}

uint64_t tw_digest(const void* data, size_t bytes) {
  return thinwire::DigestBytes({static_cast<const uint8_t*>(data), bytes});
}

tw_status tw_encoded_bytes(const char* spec, size_t n, size_t* bytes) {
  const absl::StatusOr<CodecSpec> parsed = ParseFor(spec, n);
  if (!parsed.ok()) return ToC(parsed.status());
  if (bytes == nullptr) return ToC(absl::InvalidArgumentError("the place for the size is null"));
  *bytes = thinwire::EncodedBytes(*parsed, n);
  return TW_OK;
}

tw_status tw_encode(const char* spec, const float* x, size_t n, float* residual, void* out,
                    size_t capacity, size_t* bytes) {
  const absl::StatusOr<CodecSpec> parsed = ParseFor(spec, n);
  if (!parsed.ok()) return ToC(parsed.status());
  const size_t needed = thinwire::EncodedBytes(*parsed, n);
  if (n > 0 && (x == nullptr || out == nullptr)) {
    return ToC(absl::InvalidArgumentError("tw_encode got a null array"));
  }
  if (capacity < needed) return ToC(TooSmall("the output of tw_encode", needed, capacity));
  if (n > 0) {
    thinwire::CpuBackend().Encode(*parsed, View(x, n), residual, static_cast<uint8_t*>(out),
                                  {.key = parsed->seed});
  }
  if (bytes != nullptr) *bytes = needed;
  return TW_OK;
}

tw_status tw_decode(const char* spec, const void* in, size_t bytes, float* x, size_t n) {
  const absl::StatusOr<CodecSpec> parsed = ParseFor(spec, n);
  if (!parsed.ok()) return ToC(parsed.status());
  const size_t needed = thinwire::EncodedBytes(*parsed, n);
  if (bytes != needed) {
    return ToC(TooSmall(absl::StrCat("the input of tw_decode for ", n, " elements").c_str(), needed,
                        bytes));
  }
  if (n > 0 && (in == nullptr || x == nullptr)) {
    return ToC(absl::InvalidArgumentError("tw_decode got a null array"));
  }
  if (n == 0) return TW_OK;
  const auto* wire = static_cast<const uint8_t*>(in);
  if (absl::Status bad = thinwire::CheckWire(*parsed, {wire, bytes}, n); !bad.ok()) {
    return ToC(bad);
  }
  thinwire::CpuBackend().Decode(*parsed, wire, View(x, n));
  return TW_OK;
}

tw_status tw_decode_mean(const char* spec, const void* const* in, size_t bytes,
                         const float* factors, size_t count, size_t shard, float* x, size_t n,
                         double* products) {
  const absl::StatusOr<CodecSpec> parsed = ParseFor(spec, n);
  if (!parsed.ok()) return ToC(parsed.status());
  if (count == 0 || shard == 0) {
    return ToC(absl::InvalidArgumentError(
        absl::StrCat("tw_decode_mean got ", count, " members and shards of ", shard,
                     " elements; expected one of each at least")));
  }
  if (absl::Status bad = thinwire::CheckItems("members", count); !bad.ok()) return ToC(bad);
  if (in == nullptr || factors == nullptr || products == nullptr || (n > 0 && x == nullptr)) {
    return ToC(absl::InvalidArgumentError("tw_decode_mean got a null array"));
  }
  const size_t needed = thinwire::ShardsBytes(*parsed, n, shard);
  if (bytes != needed) {
    return ToC(TooSmall(absl::StrCat("a member's input of tw_decode_mean for ", n, " elements in ",
                                     "shards of ", shard)
                            .c_str(),
                        needed, bytes));
  }
  if (n == 0) return TW_OK;
  const auto* const wires = reinterpret_cast<const uint8_t* const*>(in);
  if (std::find(wires, wires + count, nullptr) != wires + count) {
    return ToC(absl::InvalidArgumentError("tw_decode_mean got a member's null array"));
  }
  return ToC(thinwire::WeightedMean({.spec = *parsed,
                                     .wires = {wires, count},
                                     .factors = {factors, count},
                                     .shard = shard,
                                     .mean = {x, n},
                                     .products = {products, 2 * count + 1}}));
}

const char* tw_version(void) { return THINWIRE_VERSION; }

const char* tw_last_error(void) { return thinwire::LastError(); }

const char* tw_simd_target(void) { return thinwire::SimdTargetName(); }

}  // extern "C"
