// NcclShimSettings: what the environment says to the shim. A program that is not changed can't say
// it in another way. Values are checked here, once, and a wrong one ends no program.
#ifndef THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_SHIM_SETTINGS_H_
#define THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_SHIM_SETTINGS_H_

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "compress/codec_spec.h"

namespace thinwire {

struct NcclShimSettings {
  bool observe = false;   // THINWIRE_NCCL_OBSERVE: count, and say at exit what would be gained
  bool opted_in = false;  // THINWIRE_NCCL_CODEC is set, be it right or wrong
  absl::Status refusal;   // why this process takes no part although it has opted in
  CodecPair codec;
  size_t min_bytes = size_t{1} << 20;  // THINWIRE_NCCL_MIN_BYTES: smaller allreduces pass
  int ranks = 0;                       // THINWIRE_NCCL_RANKS: of communicators; 0: any
  // THINWIRE_NCCL_REDUCE_SCATTER: the opt-in is for ncclReduceScatter, too.
  bool reduce_scatter = false;
  // THINWIRE_NCCL_FEEDBACK_BYTES, of a communicator. A call names no tensor, so residuals belong
  // to addresses, which is right only where a program keeps its gradients in place.
  size_t feedback_bytes = 0;
  std::chrono::milliseconds timeout{30000};  // THINWIRE_TIMEOUT_S: of the ranks' agreement
  std::string cuda_library;                  // THINWIRE_CUDA_LIB
  bool fixed_id = false;                     // NCCL_COMM_ID: all unique ids are one
  int local_size = 1;  // LOCAL_WORLD_SIZE, which torchrun sets: ranks of a node, for the report
};

// `variable` returns null for what is not set.
NcclShimSettings ReadNcclShimSettings(const std::function<const char*(const char*)>& variable);

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_SHIM_SETTINGS_H_
