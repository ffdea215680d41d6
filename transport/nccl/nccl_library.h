// NcclLibrary: the functions of libnccl that the plane calls, found at run time, and the part of
// its ABI that they need, declared here so that building needs no headers of NCCL or CUDA. The ABI
// is that of version 2.18, which later 2.x versions keep.
#ifndef THINWIRE_TRANSPORT_NCCL_NCCL_LIBRARY_H_
#define THINWIRE_TRANSPORT_NCCL_NCCL_LIBRARY_H_

#include <climits>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>

#include "absl/status/statusor.h"

namespace thinwire {

struct NcclCommunicator;  // opaque
using NcclHandle = NcclCommunicator*;
using NcclStream = void*;  // a cudaStream_t

enum NcclResult : int {
  kNcclOk = 0,
  kNcclCudaError = 1,
  kNcclSystemError = 2,
  kNcclInternalError = 3,
  kNcclInvalidArgument = 4,
  kNcclInvalidUsage = 5,
  kNcclRemoteError = 6,  // a failure of a peer or of the network
  kNcclInProgress = 7,   // from communicators that do not block: ask again
};

enum NcclDataType : int {
  kNcclBytes = 1,  // unsigned, 8 bits
  kNcclF16 = 6,
  kNcclF32 = 7,
  kNcclBf16 = 9,
};

enum NcclReduceOp : int { kNcclSum = 0, kNcclAvg = 4 };  // callers may create others

// Passed by value.
struct NcclUniqueId {
  char bytes[128];
};
static_assert(sizeof(NcclUniqueId) == 128);

// How to make a communicator. The library knows by `version` and `size` which fields exist, and
// uses its own defaults for missing fields and for kNcclDefault.
inline constexpr int kNcclDefault = INT_MIN;
inline constexpr int kNcclOldest = 21800;  // 2.18.0
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = kNcclOldest;
  int blocking = 0;  // non-blocking: calls return kNcclInProgress instead of waiting
  int cga_cluster_size = kNcclDefault;
  int min_ctas = kNcclDefault;
  int max_ctas = kNcclDefault;
  const char* net_name = nullptr;
  int split_share = kNcclDefault;
};
static_assert(offsetof(NcclConfig, net_name) == 32 && sizeof(NcclConfig) == 48);

// A table of functions under their names in nccl.h, without the prefix.
struct NcclLibrary {
  std::string version;  // such as "2.30.7"
  std::string path;     // of the file that has the functions

  const char* (*get_error_string)(NcclResult);
  const char* (*get_last_error)(NcclHandle);
  NcclResult (*get_unique_id)(NcclUniqueId*);
  NcclResult (*comm_init_rank_config)(NcclHandle*, int size, NcclUniqueId, int rank, NcclConfig*);
  NcclResult (*comm_finalize)(NcclHandle);
  NcclResult (*comm_destroy)(NcclHandle);
  NcclResult (*comm_abort)(NcclHandle);
  NcclResult (*comm_get_async_error)(NcclHandle, NcclResult*);
  NcclResult (*group_start)();
  NcclResult (*group_end)();
  NcclResult (*send)(const void*, size_t count, NcclDataType, int peer, NcclHandle, NcclStream);
  NcclResult (*recv)(void*, size_t count, NcclDataType, int peer, NcclHandle, NcclStream);
  NcclResult (*all_gather)(const void* send, void* recv, size_t count, NcclDataType, NcclHandle,
                           NcclStream);

  // Since 2.19: registered memory. An older library lacks these functions: check registers() first.
  NcclResult (*mem_alloc)(void** memory, size_t bytes);
  NcclResult (*mem_free)(void* memory);
  // The registration may be null if the library is configured not to make any.
  NcclResult (*comm_register)(NcclHandle, void* memory, size_t bytes, void** registration);
  NcclResult (*comm_deregister)(NcclHandle, void* registration);
  bool registers() const { return mem_alloc != nullptr; }
};

// The file of the copy that is loaded in this process; empty if none is.
std::string LoadedNccl();

// Loads the library, which stays loaded. Uses the first of: the file at `path`, if one is named;
// the copy that is already in the process, such as torch's; the wheel's beside this library's
// package; the dynamic linker's. It never loads a second copy: a `path` other than the file that is
// already loaded is refused.
//
// Unimplemented, with the fix, if there is none, or it is older than 2.18 or lacks a function.
absl::StatusOr<std::shared_ptr<const NcclLibrary>> LoadNccl(const std::string& path);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_NCCL_NCCL_LIBRARY_H_
