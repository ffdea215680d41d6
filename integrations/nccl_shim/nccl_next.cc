#include "integrations/nccl_shim/nccl_next.h"

#include <dlfcn.h>

#include "transport/nccl/nccl_library.h"

namespace thinwire {

NcclNext FindNcclNext(const std::function<void*(const char* name)>& find) {
  NcclNext next;
  const auto look = [&find](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(find(name));
  };
  look("ncclGetUniqueId", &next.get_unique_id);
  look("ncclCommInitRank", &next.comm_init_rank);
  look("ncclCommInitRankConfig", &next.comm_init_rank_config);
  look("ncclCommDestroy", &next.comm_destroy);
  look("ncclCommAbort", &next.comm_abort);
  look("ncclAllReduce", &next.all_reduce);
  look("ncclAllReduceConfig", &next.all_reduce_config);
  look("ncclReduceScatter", &next.reduce_scatter);
  look("ncclReduceScatterConfig", &next.reduce_scatter_config);
  look("ncclGroupStart", &next.group_start);
  look("ncclGroupEnd", &next.group_end);
  look("ncclGroupSimulateEnd", &next.group_simulate_end);
  look("ncclCommCount", &next.comm_count);
  look("ncclCommCuDevice", &next.comm_device);
  return next;
}

NcclNext FindNcclNextInProcess() {
  const std::string loaded = LoadedNccl();
  void* const copy =
      loaded.empty() ? nullptr : dlopen(loaded.c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  return FindNcclNext([copy](const char* name) {
    void* const behind = dlsym(RTLD_NEXT, name);
    return behind != nullptr || copy == nullptr ? behind : dlsym(copy, name);
  });
}

}  // namespace thinwire
