// The functions that the dynamic linker finds in place of libnccl's: LD_PRELOAD loads
// libthinwire_nccl_shim.so before it. All other functions of NCCL are its own.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "integrations/nccl_shim/nccl_shim.h"
#include "kernels/device.h"

namespace thinwire {
namespace {

void Say(const std::string& text) {
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::string whole = absl::StrCat("thinwire's NCCL shim: ", line, "\n");
    std::fwrite(whole.data(), 1, whole.size(), stderr);
  }
}

// A child that was forked has counted nothing itself.
void SayReportOf(const NcclShim& shim) {
  static const pid_t counter = getpid();
  static const NcclShim& counted = shim;
  std::atexit([] {
    if (getpid() == counter) Say(counted.Report());
  });
}

// The process's own, which stays to its end: threads may call it for as long.
NcclShim& Shim() {
  static NcclShim& shim = *[] {
    const NcclShimSettings settings =
        ReadNcclShimSettings([](const char* name) -> const char* { return std::getenv(name); });
    const auto open_device = [library = settings.cuda_library](int ordinal) {
      return OpenDevice(absl::StrCat("cuda:", ordinal), library);
    };
    auto* const made = new NcclShim(
        settings, {FindNcclNextInProcess(), [] { return LoadNccl(""); }, open_device, Say});
    if (settings.observe) SayReportOf(*made);
    return made;
  }();
  return shim;
}

}  // namespace
}  // namespace thinwire

#define THINWIRE_EXPORT extern "C" __attribute__((visibility("default")))

using namespace thinwire;  // NOLINT: all that follows is another library's interface

THINWIRE_EXPORT NcclResult ncclGetUniqueId(NcclUniqueId* id) { return Shim().GetUniqueId(id); }
THINWIRE_EXPORT NcclResult ncclCommInitRank(NcclHandle* comm, int size, NcclUniqueId id, int rank) {
  return Shim().CommInitRank(comm, size, id, rank);
}
THINWIRE_EXPORT NcclResult ncclCommInitRankConfig(NcclHandle* comm, int size, NcclUniqueId id,
                                                  int rank, NcclConfig* config) {
  return Shim().CommInitRankConfig(comm, size, id, rank, config);
}
THINWIRE_EXPORT NcclResult ncclCommDestroy(NcclHandle comm) { return Shim().CommDestroy(comm); }
THINWIRE_EXPORT NcclResult ncclCommAbort(NcclHandle comm) { return Shim().CommAbort(comm); }
THINWIRE_EXPORT NcclResult ncclAllReduce(const void* send, void* recv, size_t count,
                                         NcclDataType type, NcclReduceOp op, NcclHandle comm,
                                         NcclStream stream) {
  return Shim().Reduce({Collective::kAllReduce, send, recv, count, type, op, comm, stream});
}
THINWIRE_EXPORT NcclResult ncclAllReduceConfig(const void* send, void* recv, size_t count,
                                               NcclDataType type, NcclReduceOp op, NcclHandle comm,
                                               NcclStream stream, const void* config) {
  return Shim().Reduce({Collective::kAllReduce, send, recv, count, type, op, comm, stream, config});
}
THINWIRE_EXPORT NcclResult ncclReduceScatter(const void* send, void* recv, size_t count,
                                             NcclDataType type, NcclReduceOp op, NcclHandle comm,
                                             NcclStream stream) {
  return Shim().Reduce({Collective::kReduceScatter, send, recv, count, type, op, comm, stream});
}
THINWIRE_EXPORT NcclResult ncclReduceScatterConfig(const void* send, void* recv, size_t count,
                                                   NcclDataType type, NcclReduceOp op,
                                                   NcclHandle comm, NcclStream stream,
                                                   const void* config) {
  return Shim().Reduce(
      {Collective::kReduceScatter, send, recv, count, type, op, comm, stream, config});
}
THINWIRE_EXPORT NcclResult ncclGroupStart() { return Shim().GroupStart(); }
THINWIRE_EXPORT NcclResult ncclGroupEnd() { return Shim().GroupEnd(); }
THINWIRE_EXPORT NcclResult ncclGroupSimulateEnd(void* estimate) {
  return Shim().GroupSimulateEnd(estimate);
}
