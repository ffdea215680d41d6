// tw_encode, tw_decode, tw_decode_mean: shards of compress/FORMAT.md, without a communicator.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "compress/backend.h"
#include "compress/codec_spec.h"
#include "compress/weighted_mean.h"
#include "integrations/c/status.h"
#include "schedule/hash.h"

using thinwire::CodecPair;
using thinwire::CodecSpec;
using thinwire::ToC;

namespace {

absl::StatusOr<CodecSpec> Parse(const char* spec) {
  if (spec == nullptr) return absl::InvalidArgumentError("the spec is null");
  const absl::StatusOr<CodecPair> pair = CodecPair::Parse(spec);
  if (!pair.ok()) return pair.status();
  return pair->up;
}

// A spec that fits so many elements.
absl::StatusOr<CodecSpec> ParseFor(const char* spec, size_t n) {
  absl::StatusOr<CodecSpec> parsed = Parse(spec);
  if (absl::Status bad = thinwire::CheckElements(n); parsed.ok() && !bad.ok()) return bad;
  return parsed;
}

absl::Status TooSmall(const char* what, size_t expected, size_t got) {
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": expected ", expected, " bytes, got ", got));
}

thinwire::TensorView View(const float* x, size_t n) { return {const_cast<float*>(x), n}; }

}  // namespace

extern "C" {

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
