// NcclLibrary: the functions of libnccl that the plane calls, found at run time.
#ifndef THINWIRE_TRANSPORT_NCCL_NCCL_LIBRARY_H_
#define THINWIRE_TRANSPORT_NCCL_NCCL_LIBRARY_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/nccl/nccl_abi.h"

namespace thinwire {

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
