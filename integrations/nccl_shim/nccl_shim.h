// NcclShim: stands between a program and NCCL. Reductions that may go compressed do; all other
// calls pass, and calls of which nothing is known pass untouched.
//
// Compressed go allreduces, and on request reduce-scatters: sums and means of f32, bf16 and f16
// from a size on, outside group calls and graph captures, on communicators that ncclCommInitRank or
// ncclCommInitRankConfig has made outside a group, whose ranks have all opted in and agree.
#ifndef THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_SHIM_H_
#define THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_SHIM_H_

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "integrations/nccl_shim/nccl_call.h"
#include "integrations/nccl_shim/nccl_observer.h"
#include "integrations/nccl_shim/nccl_session.h"

namespace thinwire {

// Thread-safe, as far as NCCL is: different communicators on different threads.
class NcclShim {
 public:
  NcclShim(NcclShimSettings settings, NcclShimMeans means)
      : settings_(std::move(settings)), means_(std::move(means)), observer_(settings_.local_size) {}

  // As the functions of NCCL with these names. One that this process's NCCL lacks is
  // kNcclInvalidUsage, and said.
  NcclResult GetUniqueId(NcclUniqueId* id);
  NcclResult CommInitRank(NcclHandle* comm, int size, const NcclUniqueId& id, int rank);
  NcclResult CommInitRankConfig(NcclHandle* comm, int size, const NcclUniqueId& id, int rank,
                                NcclConfig* config);
  NcclResult CommDestroy(NcclHandle comm);
  NcclResult CommAbort(NcclHandle comm);
  NcclResult Reduce(const NcclCall& call);  // ncclAllReduce, ncclReduceScatter, and with Config
  NcclResult GroupStart();
  NcclResult GroupEnd();
  NcclResult GroupSimulateEnd(void* estimate);

  // The counts of THINWIRE_NCCL_OBSERVE; empty without it.
  std::string Report() const { return observer_.Report(); }

 private:
  using SessionPtr = std::shared_ptr<NcclSession>;

  // Calls a function of NCCL, or says that there is none of that name.
  template <typename Function, typename... Args>
  NcclResult Pass(const char* name, Function function, Args... args) const;
  // After one was made on this rank.
  NcclResult Made(NcclResult result, NcclHandle* comm, Membership members, const NcclUniqueId& id);
  // The session is ended when NCCL has ended the communicator: only then is nothing queued on it.
  NcclResult End(const char* name, NcclResult (*end)(NcclHandle), NcclHandle comm);
  SessionPtr SessionOf(NcclHandle comm) const;
  NcclWay WayOf(const NcclCall& call, NcclSession* session) const;
  NcclResult PassOn(const NcclCall& call) const;
  NcclResult Compress(NcclReducer& reducer, const NcclCall& call, int ranks) const;
  void Observe(const NcclCall& call, NcclWay way);

  const NcclShimSettings settings_;
  const NcclShimMeans means_;
  NcclObserver observer_;
  MeetingHost host_;

  mutable absl::Mutex mu_;
  std::map<NcclHandle, SessionPtr> sessions_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_SHIM_H_
