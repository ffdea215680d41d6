// NcclNext: the functions of NCCL that the shim stands in front of, as the program would have
// called them: another interposer's, or the library's own.
#ifndef THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_NEXT_H_
#define THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_NEXT_H_

#include <cstddef>
#include <functional>
#include <string>

#include "transport/nccl/nccl_library.h"

namespace thinwire {

// A table of functions under their names in nccl.h, less the prefix. Null: there is none.
struct NcclNext {
  NcclResult (*get_unique_id)(NcclUniqueId*) = nullptr;
  NcclResult (*comm_init_rank)(NcclHandle*, int size, NcclUniqueId, int rank) = nullptr;
  NcclResult (*comm_init_rank_config)(NcclHandle*, int size, NcclUniqueId, int rank,
                                      NcclConfig*) = nullptr;
  NcclResult (*comm_destroy)(NcclHandle) = nullptr;
  NcclResult (*comm_abort)(NcclHandle) = nullptr;
  NcclResult (*all_reduce)(const void* send, void* recv, size_t count, NcclDataType, NcclReduceOp,
                           NcclHandle, NcclStream) = nullptr;
  // From 2.31 on; the configuration of the call is NCCL's own.
  NcclResult (*all_reduce_config)(const void* send, void* recv, size_t count, NcclDataType,
                                  NcclReduceOp, NcclHandle, NcclStream,
                                  const void* config) = nullptr;
  NcclResult (*reduce_scatter)(const void* send, void* recv, size_t count, NcclDataType,
                               NcclReduceOp, NcclHandle, NcclStream) = nullptr;
  NcclResult (*reduce_scatter_config)(const void* send, void* recv, size_t count, NcclDataType,
                                      NcclReduceOp, NcclHandle, NcclStream,
                                      const void* config) = nullptr;
  NcclResult (*group_start)() = nullptr;
  NcclResult (*group_end)() = nullptr;
  NcclResult (*group_simulate_end)(void* estimate) = nullptr;  // from 2.22 on

  // Asked by the shim itself.
  NcclResult (*comm_count)(NcclHandle, int* size) = nullptr;
  NcclResult (*comm_device)(NcclHandle, int* ordinal) = nullptr;  // ncclCommCuDevice
};

// Fills the table by `find`, which returns null for a name that it does not know.
NcclNext FindNcclNext(const std::function<void*(const char* name)>& find);

// Those behind this library in the dynamic linker's order; where the program's libnccl is not in
// that order, as Python's modules are not, those of the copy that is loaded.
NcclNext FindNcclNextInProcess();

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_NEXT_H_
