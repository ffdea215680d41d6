// The part of libnccl's binary interface that is used, declared anew: building needs neither its
// headers nor CUDA's. It is that of version 2.18, which later ones of major version 2 keep.
#ifndef THINWIRE_TRANSPORT_NCCL_NCCL_ABI_H_
#define THINWIRE_TRANSPORT_NCCL_NCCL_ABI_H_

#include <climits>
#include <cstddef>
#include <type_traits>

namespace thinwire {

struct NcclCommunicator;  // the library's own
using NcclHandle = NcclCommunicator*;
using NcclStream = void*;  // a cudaStream_t

enum NcclResult : int {
  kNcclOk = 0,
  kNcclCudaError = 1,
  kNcclSystemError = 2,
  kNcclInternalError = 3,
  kNcclInvalidArgument = 4,
  kNcclInvalidUsage = 5,
  kNcclRemoteError = 6,  // a peer's failure, or the network's
  kNcclInProgress = 7,   // of communicators that do not block: ask again
};

enum NcclDataType : int {
  kNcclBytes = 1,  // unsigned, of 8 bits
  kNcclF16 = 6,
  kNcclF32 = 7,
  kNcclBf16 = 9,
};

enum NcclReduceOp : int { kNcclSum = 0, kNcclAvg = 4 };  // others are a caller's own, too

// Passed by value.
struct NcclUniqueId {
  char bytes[128];
};
static_assert(sizeof(NcclUniqueId) == 128);

// How a communicator is made. The library knows by `version` and `size` which fields are there, and
// takes its own defaults for those that are not, and for kNcclDefault.
inline constexpr int kNcclDefault = INT_MIN;
inline constexpr int kNcclOldest = 21800;  // 2.18.0
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = kNcclOldest;
  int blocking = 0;  // no: calls return kNcclInProgress where they would wait
  int cga_cluster_size = kNcclDefault;
  int min_ctas = kNcclDefault;
  int max_ctas = kNcclDefault;
  const char* net_name = nullptr;
  int split_share = kNcclDefault;
};
static_assert(offsetof(NcclConfig, net_name) == 32 && sizeof(NcclConfig) == 48);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_NCCL_NCCL_ABI_H_
