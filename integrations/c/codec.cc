// tw_encode, tw_decode: one shard of compress/FORMAT.md, without a communicator.
#include "absl/strings/str_cat.h"
#include "compress/backend.h"
#include "compress/element_limit.h"
#include "compress/simd_target.h"
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
  const absl::StatusOr<CodecSpec> parsed = Parse(spec);
  if (!parsed.ok()) return ToC(parsed.status());
  if (bytes == nullptr) return ToC(absl::InvalidArgumentError("the place for the size is null"));
  if (absl::Status bad = thinwire::CheckElements(n); !bad.ok()) return ToC(bad);
  *bytes = thinwire::EncodedBytes(*parsed, n);
  return TW_OK;
}

tw_status tw_encode(const char* spec, const float* x, size_t n, float* residual, void* out,
                    size_t capacity, size_t* bytes) {
  size_t needed = 0;
  if (const tw_status bad = tw_encoded_bytes(spec, n, &needed); bad != TW_OK) return bad;
  if (n > 0 && (x == nullptr || out == nullptr)) {
    return ToC(absl::InvalidArgumentError("tw_encode got a null array"));
  }
  if (capacity < needed) return ToC(TooSmall("the output of tw_encode", needed, capacity));
  if (n > 0) {
    const CodecSpec parsed = *Parse(spec);
    thinwire::CpuBackend().Encode(parsed, View(x, n), residual, static_cast<uint8_t*>(out),
                                  {.key = parsed.seed});
  }
  if (bytes != nullptr) *bytes = needed;
  return TW_OK;
}

tw_status tw_decode(const char* spec, const void* in, size_t bytes, float* x, size_t n) {
  size_t needed = 0;
  if (const tw_status bad = tw_encoded_bytes(spec, n, &needed); bad != TW_OK) return bad;
  if (bytes != needed) {
    return ToC(TooSmall(absl::StrCat("the input of tw_decode for ", n, " elements").c_str(), needed,
                        bytes));
  }
  if (n > 0 && (in == nullptr || x == nullptr)) {
    return ToC(absl::InvalidArgumentError("tw_decode got a null array"));
  }
  if (n == 0) return TW_OK;
  const auto* wire = static_cast<const uint8_t*>(in);
  if (absl::Status bad = thinwire::CheckWire(*Parse(spec), {wire, bytes}, n); !bad.ok()) {
    return ToC(bad);
  }
  thinwire::CpuBackend().Decode(*Parse(spec), wire, View(x, n));
  return TW_OK;
}

const char* tw_version(void) { return THINWIRE_VERSION; }

const char* tw_last_error(void) { return thinwire::LastError(); }

const char* tw_simd_target(void) { return thinwire::SimdTargetName(); }

}  // extern "C"
