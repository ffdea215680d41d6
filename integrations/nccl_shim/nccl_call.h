// A call of ncclAllReduce or ncclReduceScatter, and the ways that it may go.
#ifndef THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_CALL_H_
#define THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_CALL_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "compress/types.h"
#include "schedule/request.h"
#include "transport/nccl/nccl_library.h"

namespace thinwire {

struct NcclCall {
  Collective collective = Collective::kAllReduce;
  const void* send = nullptr;
  void* recv = nullptr;
  size_t count = 0;  // of recv
  NcclDataType type = kNcclF32;
  NcclReduceOp op = kNcclSum;
  NcclHandle comm = nullptr;
  NcclStream stream = nullptr;
  const void* config = nullptr;  // of ncclAllReduceConfig and the like; null: none

  // Nothing where the codecs know no such elements, or no such reduction.
  std::optional<DType> dtype() const {
    switch (type) {
      case kNcclF32: return DType::kF32;
      case kNcclBf16: return DType::kBF16;
      case kNcclF16: return DType::kF16;
      default: return std::nullopt;
    }
  }
  std::optional<Op> operation() const {
    switch (op) {
      case kNcclSum: return Op::kSum;
      case kNcclAvg: return Op::kMean;
      default: return std::nullopt;
    }
  }
  // The bytes of the result of a call that has a dtype.
  size_t bytes() const { return count * SizeOf(*dtype()); }
};

enum class NcclWay : uint8_t {
  kCompressed,
  kCandidate,  // could go compressed, but nobody has opted in, or the ranks have not agreed
  kOther,      // of other elements, or another reduction
  kSmall,
  kScattered,  // a reduce-scatter, for which nobody has opted in
  kAlone,      // on a communicator of one rank
  kGrouped,
  kCaptured,
};

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_CALL_H_
