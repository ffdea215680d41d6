// tw_comm_stats, tw_residual_*: what a communicator has done and what it remembers.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compress/element_limit.h"
#include "integrations/c/call.h"
#include "integrations/c/communicator.h"
#include "integrations/c/status.h"
#include "integrations/c/text.h"

using thinwire::CheckComm;
using thinwire::ToC;

namespace {

absl::Status WrongSize(const char* name, size_t expected, size_t got) {
  return absl::InvalidArgumentError(
      absl::StrCat("the residual of '", name, "' has ", expected, " elements, got room for ", got));
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
  *raw = comm->engine->GoesRaw({nullptr, count, static_cast<thinwire::DType>(dtype)}) ? 1 : 0;
  return TW_OK;
}

tw_status tw_comm_set_step(tw_comm* comm, uint64_t step) {
  if (absl::Status bad = CheckComm("tw_comm_set_step", comm); !bad.ok()) return ToC(bad);
  comm->engine->SetStep(step);
  return TW_OK;
}

tw_status tw_comm_end_step(tw_comm* comm) {
  if (absl::Status bad = CheckComm("tw_comm_end_step", comm); !bad.ok()) return ToC(bad);
  comm->engine->EndStep();
  return TW_OK;
}

tw_status tw_residual_count(tw_comm* comm, size_t* count) {
  if (absl::Status bad = CheckComm("tw_residual_count", comm, {count}); !bad.ok()) return ToC(bad);
  *count = comm->engine->error_feedback().Names().size();
  return TW_OK;
}

tw_status tw_residual_info(tw_comm* comm, size_t index, char* name, size_t capacity,
                           size_t* numel) {
  if (absl::Status bad = CheckComm("tw_residual_info", comm, {name, numel}); !bad.ok())
    return ToC(bad);
  const thinwire::ErrorFeedback& feedback = comm->engine->error_feedback();
  const std::vector<std::string> names = feedback.Names();
  if (index >= names.size()) {
    return ToC(absl::InvalidArgumentError(
        absl::StrCat("residual ", index, " of ", names.size(), " does not exist")));
  }
  *numel = feedback.Numel(names[index]);
  return ToC(thinwire::WriteText("the name", names[index], name, capacity));
}

tw_status tw_residual_get(tw_comm* comm, const char* name, float* first, float* second,
                          float* momentum, size_t numel) {
  if (absl::Status bad = CheckComm("tw_residual_get", comm, {name, first, second}); !bad.ok())
    return ToC(bad);
  thinwire::ParameterResidual residual;
  if (absl::Status bad = comm->engine->error_feedback().Export(name, &residual); !bad.ok())
    return ToC(bad);
  if (residual.first.size() != numel) return ToC(WrongSize(name, residual.first.size(), numel));
  std::copy(residual.first.begin(), residual.first.end(), first);
  std::copy(residual.second.begin(), residual.second.end(), second);
  if (momentum == nullptr) return TW_OK;
  residual.momentum.resize(numel);
  std::copy(residual.momentum.begin(), residual.momentum.end(), momentum);
  return TW_OK;
}

tw_status tw_residual_undo(tw_comm* comm) {
  if (absl::Status bad = CheckComm("tw_residual_undo", comm); !bad.ok()) return ToC(bad);
  return ToC(comm->engine->error_feedback().Undo());
}

tw_status tw_residual_set(tw_comm* comm, const char* name, const float* first, const float* second,
                          const float* momentum, size_t numel) {
  if (absl::Status bad = CheckComm("tw_residual_set", comm, {name, first, second}); !bad.ok())
    return ToC(bad);
  thinwire::ErrorFeedback& feedback = comm->engine->error_feedback();
  const size_t known = feedback.Numel(name);
  if (known != 0 && known != numel) return ToC(WrongSize(name, known, numel));
  if (absl::Status bad = thinwire::CheckElements(numel); !bad.ok()) return ToC(bad);
  thinwire::ParameterResidual residual{.first = {first, first + numel},
                                       .second = {second, second + numel},
                                       .momentum = {},
                                       .second_hop_weight = static_cast<float>(comm->size)};
  if (momentum != nullptr) residual.momentum.assign(momentum, momentum + numel);
  return ToC(feedback.Import(name, std::move(residual)));
}

}  // extern "C"
