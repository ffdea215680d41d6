// tw_comm_stats, tw_residual_*: a communicator's counters, residuals and momentum.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compress/codec_spec.h"
#include "integrations/c/border.h"

using thinwire::CheckComm;
using thinwire::ToC;

namespace {

// Converts the caller's arrays for ErrorFeedback. InvalidArgument for a null pointer or too many
// elements.
absl::StatusOr<std::vector<thinwire::StateArray>> ToArrays(const char* call,
                                                           const tw_residual_array* arrays,
                                                           size_t count) {
  if (absl::Status bad = thinwire::CheckItems("arrays", count); !bad.ok()) return bad;
  std::vector<thinwire::StateArray> converted;
  converted.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const tw_residual_array& array = arrays[i];
    if (array.parameter == nullptr || array.array == nullptr ||
        (array.values == nullptr && array.numel > 0)) {
      return absl::InvalidArgumentError(
          absl::StrCat(call, ": array ", i, " of ", count, " has a null pointer"));
    }
    if (absl::Status bad = thinwire::CheckElements(array.numel); !bad.ok()) return bad;
    converted.push_back({array.parameter, array.array, {array.values, array.numel}});
  }
  return converted;
}

// The same for the arrays of one parameter; momentum may be null.
std::vector<thinwire::StateArray> ArraysOf(const char* name, float* first, float* second,
                                           float* momentum, size_t numel) {
  std::vector<thinwire::StateArray> arrays = {{name, thinwire::kFirstHop, {first, numel}},
                                              {name, thinwire::kSecondHop, {second, numel}}};
  if (momentum != nullptr) arrays.push_back({name, thinwire::kMomentum, {momentum, numel}});
  return arrays;
}

}  // namespace

extern "C" {

tw_status tw_comm_stats(tw_comm* comm, tw_stats* out) {
  if (absl::Status bad = CheckComm("tw_comm_stats", comm, {out}); !bad.ok()) return ToC(bad);
  const thinwire::Stats stats = comm->engine->stats();
  const auto& s = stats.seconds;
  *out = {stats.all_reduces,
          stats.raw_bytes,
          stats.wire_bytes,
          stats.predicted_chunks,
          s[0],
          s[1],
          s[2],
          s[3],
          s[4],
          s[5]};
  return TW_OK;
}

tw_status tw_comm_codec(tw_comm* comm, size_t index, char* spec, size_t capacity) {
  if (absl::Status bad = CheckComm("tw_comm_codec", comm, {spec}); !bad.ok()) return ToC(bad);
  const auto& codecs = comm->engine->codecs();
  if (index >= codecs.size()) {
    return ToC(absl::InvalidArgumentError(
        absl::StrCat("codec ", index, " of ", codecs.size(), " does not exist")));
  }
  return ToC(thinwire::WriteText("the spec", codecs[index].ToString(), spec, capacity));
}

tw_status tw_comm_goes_raw(tw_comm* comm, size_t count, tw_dtype dtype, int* raw) {
  if (absl::Status bad = CheckComm("tw_comm_goes_raw", comm, {raw}); !bad.ok()) return ToC(bad);
  if (absl::Status bad = thinwire::CheckCall(comm, dtype, TW_SUM, nullptr); !bad.ok()) {
    return ToC(bad);
  }
  if (absl::Status bad = thinwire::CheckElements(count); !bad.ok()) return ToC(bad);
  *raw = comm->engine->GoesRaw({nullptr, count, static_cast<thinwire::DType>(dtype)}) ? 1 : 0;
  return TW_OK;
}

tw_status tw_comm_set_step(tw_comm* comm, uint64_t step) {
  if (absl::Status bad = CheckComm("tw_comm_set_step", comm); !bad.ok()) return ToC(bad);
  comm->engine->SetStep(step);
  return TW_OK;
}

tw_status tw_residual_count(tw_comm* comm, size_t* count) {
  if (absl::Status bad = CheckComm("tw_residual_count", comm, {count}); !bad.ok()) return ToC(bad);
  *count = comm->engine->error_feedback().parameters().size();
  return TW_OK;
}

tw_status tw_residual_info(tw_comm* comm, size_t index, char* name, size_t capacity,
                           size_t* numel) {
  if (absl::Status bad = CheckComm("tw_residual_info", comm, {name, numel}); !bad.ok())
    return ToC(bad);
  const auto& parameters = comm->engine->error_feedback().parameters();
  if (index >= parameters.size()) {
    return ToC(absl::InvalidArgumentError(
        absl::StrCat("residual ", index, " of ", parameters.size(), " does not exist")));
  }
  *numel = parameters[index].numel;
  return ToC(thinwire::WriteText("the name", parameters[index].name, name, capacity));
}

tw_status tw_residual_get(tw_comm* comm, const char* name, float* first, float* second,
                          float* momentum, size_t numel) {
  if (absl::Status bad = CheckComm("tw_residual_get", comm, {name, first, second}); !bad.ok())
    return ToC(bad);
  return ToC(comm->engine->error_feedback().Export(ArraysOf(name, first, second, momentum, numel)));
}

tw_status tw_residual_get_all(tw_comm* comm, const tw_residual_array* arrays, size_t count) {
  constexpr char kCall[] = "tw_residual_get_all";
  if (absl::Status bad = CheckComm(kCall, comm, {arrays}); !bad.ok()) return ToC(bad);
  const auto converted = ToArrays(kCall, arrays, count);
  if (!converted.ok()) return ToC(converted.status());
  return ToC(comm->engine->error_feedback().Export(*converted));
}

tw_status tw_residual_undo(tw_comm* comm) {
  if (absl::Status bad = CheckComm("tw_residual_undo", comm); !bad.ok()) return ToC(bad);
  return ToC(comm->engine->error_feedback().Undo());
}

tw_status tw_residual_set(tw_comm* comm, const char* name, const float* first, const float* second,
                          const float* momentum, size_t numel) {
  if (absl::Status bad = CheckComm("tw_residual_set", comm, {name, first, second}); !bad.ok())
    return ToC(bad);
  if (absl::Status bad = thinwire::CheckElements(numel); !bad.ok()) return ToC(bad);
  // The const_casts are safe because Import only reads.
  const auto arrays = ArraysOf(name, const_cast<float*>(first), const_cast<float*>(second),
                               const_cast<float*>(momentum), numel);
  return ToC(comm->engine->error_feedback().Import(arrays, static_cast<float>(comm->size)));
}

tw_status tw_residual_set_all(tw_comm* comm, const tw_residual_array* arrays, size_t count) {
  constexpr char kCall[] = "tw_residual_set_all";
  if (absl::Status bad = CheckComm(kCall, comm, {arrays}); !bad.ok()) return ToC(bad);
  const auto converted = ToArrays(kCall, arrays, count);
  if (!converted.ok()) return ToC(converted.status());
  return ToC(comm->engine->error_feedback().Import(*converted, static_cast<float>(comm->size)));
}

}  // extern "C"
