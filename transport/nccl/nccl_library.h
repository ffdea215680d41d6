// NcclLibrary: the functions of libnccl that the plane calls, found at run time, and the part of
// its binary interface that they need, declared anew: building needs neither its headers nor
// CUDA's. It is that of version 2.18, which later ones of major version 2 keep.
#ifndef THINWIRE_TRANSPORT_NCCL_NCCL_LIBRARY_H_
#define THINWIRE_TRANSPORT_NCCL_NCCL_LIBRARY_H_

#include <climits>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>

#include "absl/status/statusor.h"

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

// A table of functions under their names in nccl.h, less the prefix.
struct NcclLibrary {
  std::string version;  // such as "2.30.7"
  std::string path;     // of the file that the functions are in

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

  // Since 2.19: memory that communicators know. See registers() first: an older library lacks them.
  NcclResult (*mem_alloc)(void** memory, size_t bytes);
  NcclResult (*mem_free)(void* memory);
  // The registration may come back null: the library was set to make none.
  NcclResult (*comm_register)(NcclHandle, void* memory, size_t bytes, void** registration);
  NcclResult (*comm_deregister)(NcclHandle, void* registration);
  bool registers() const { return mem_alloc != nullptr; }
};

// The file of the copy that somebody in this process has loaded; empty: nobody has.
std::string LoadedNccl();

// The library, which stays loaded. It is the first of: the file at `path`, if one is named; the
// copy that is in the process already, such as torch's; the wheel's beside this library's package;
// the dynamic linker's. Never does it load a second copy: naming another file than the one that is
// loaded already is refused.
//
// Unimplemented, with the mend, if there is none, it is older than 2.18, or lacks a function.
absl::StatusOr<std::shared_ptr<const NcclLibrary>> LoadNccl(const std::string& path);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_NCCL_NCCL_LIBRARY_H_
