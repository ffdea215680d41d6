#include "integrations/nccl_shim/nccl_shim.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "integrations/nccl_shim/nccl_meeting.h"

namespace thinwire {
namespace {

// NCCL's groups are a thread's own.
thread_local int open_groups = 0;

NcclResult ResultOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk: return kNcclOk;
    case absl::StatusCode::kUnavailable: return kNcclRemoteError;
    case absl::StatusCode::kInvalidArgument: return kNcclInvalidArgument;
    case absl::StatusCode::kResourceExhausted: return kNcclCudaError;
    default: return kNcclInternalError;
  }
}

}  // namespace

template <typename Function, typename... Args>
NcclResult NcclShim::Pass(const char* name, Function function, Args... args) const {
  if (function != nullptr) return function(args...);
  means_.say(absl::StrCat("this process has no ", name,
                          " to pass a call on to; load the shim into programs that link libnccl as "
                          "a shared library"));
  return kNcclInvalidUsage;
}

NcclResult NcclShim::GetUniqueId(NcclUniqueId* id) {
  if (settings_.opted_in && id != nullptr) *id = {};
  const NcclResult result = Pass("ncclGetUniqueId", means_.next.get_unique_id, id);
  if (result != kNcclOk || !settings_.opted_in) return result;
  const absl::Status invited =
      settings_.fixed_id
          ? absl::UnimplementedError(
                "NCCL_COMM_ID makes all unique ids one, so that ranks of several communicators "
                "would meet; unset it")
          : host_.Invite(id);
  if (!invited.ok()) {
    means_.say(absl::StrCat("communicators of this id go uncompressed: ", invited.message()));
  }
  return result;
}

NcclResult NcclShim::CommInitRank(NcclHandle* comm, int size, const NcclUniqueId& id, int rank) {
  return Made(Pass("ncclCommInitRank", means_.next.comm_init_rank, comm, size, id, rank), comm,
              {rank, size}, id);
}

NcclResult NcclShim::CommInitRankConfig(NcclHandle* comm, int size, const NcclUniqueId& id,
                                        int rank, NcclConfig* config) {
  return Made(Pass("ncclCommInitRankConfig", means_.next.comm_init_rank_config, comm, size, id,
                   rank, config),
              comm, {rank, size}, id);
}

NcclResult NcclShim::Made(NcclResult result, NcclHandle* comm, Membership members,
                          const NcclUniqueId& id) {
  const bool made = result == kNcclOk || result == kNcclInProgress;
  const bool wanted = settings_.ranks == 0 || settings_.ranks == members.size;
  if (!made || !settings_.opted_in || open_groups > 0 || members.size == 1 || !wanted) {
    return result;
  }
  std::optional<MeetingPlace> meeting = MeetingOf(id);
  if (!meeting.has_value()) {
    means_.say(absl::StrCat("rank ", members.rank, " of ", members.size,
                            ": this communicator goes uncompressed: whoever made its unique id has "
                            "not opted in; set THINWIRE_NCCL_CODEC and LD_PRELOAD there as well"));
    return result;
  }
  const auto session =
      std::make_shared<NcclSession>(settings_, means_, members, *comm, *std::move(meeting));
  const absl::MutexLock lock(&mu_);
  sessions_[*comm] = session;
  return result;
}

NcclResult NcclShim::CommDestroy(NcclHandle comm) {
  return End("ncclCommDestroy", means_.next.comm_destroy, comm);
}

NcclResult NcclShim::CommAbort(NcclHandle comm) {
  return End("ncclCommAbort", means_.next.comm_abort, comm);
}

// It leaves the table before, since NCCL may give the handle to another thread's communicator.
NcclResult NcclShim::End(const char* name, NcclResult (*end)(NcclHandle), NcclHandle comm) {
  SessionPtr session;
  {
    const absl::MutexLock lock(&mu_);
    if (const auto found = sessions_.find(comm); found != sessions_.end()) {
      session = std::move(found->second);
      sessions_.erase(found);
    }
  }
  return Pass(name, end, comm);
}

NcclShim::SessionPtr NcclShim::SessionOf(NcclHandle comm) const {
  const absl::MutexLock lock(&mu_);
  const auto found = sessions_.find(comm);
  return found == sessions_.end() ? nullptr : found->second;
}

NcclResult NcclShim::PassOn(const NcclCall& call) const {
  const NcclNext& next = means_.next;
  const bool scatters = call.collective == Collective::kReduceScatter;
  if (call.config != nullptr) {
    return Pass(scatters ? "ncclReduceScatterConfig" : "ncclAllReduceConfig",
                scatters ? next.reduce_scatter_config : next.all_reduce_config, call.send,
                call.recv, call.count, call.type, call.op, call.comm, call.stream, call.config);
  }
  return Pass(scatters ? "ncclReduceScatter" : "ncclAllReduce",
              scatters ? next.reduce_scatter : next.all_reduce, call.send, call.recv, call.count,
              call.type, call.op, call.comm, call.stream);
}

NcclResult NcclShim::Reduce(const NcclCall& call) {
  if (!settings_.opted_in && !settings_.observe) return PassOn(call);
  const SessionPtr session = SessionOf(call.comm);
  NcclWay way = WayOf(call, session.get());
  NcclReducer* const reducer =
      way == NcclWay::kCandidate && session != nullptr ? session->reducer() : nullptr;
  if (reducer != nullptr) way = NcclWay::kCompressed;
  if (settings_.observe) Observe(call, way);
  return reducer != nullptr ? Compress(*reducer, call, session->size()) : PassOn(call);
}

// The same on all ranks, whose calls match.
NcclWay NcclShim::WayOf(const NcclCall& call, NcclSession* session) const {
  if (!call.dtype().has_value() || !call.operation().has_value() || call.send == nullptr ||
      call.recv == nullptr) {
    return NcclWay::kOther;
  }
  if (call.collective == Collective::kReduceScatter && !settings_.reduce_scatter) {
    return NcclWay::kScattered;
  }
  if (call.bytes() < std::max<size_t>(1, settings_.min_bytes)) return NcclWay::kSmall;
  if (open_groups > 0) return NcclWay::kGrouped;
  if (session != nullptr && session->IsCapturing(call.stream)) return NcclWay::kCaptured;
  return NcclWay::kCandidate;
}

NcclResult NcclShim::Compress(NcclReducer& reducer, const NcclCall& call, int ranks) const {
  const bool scatters = call.collective == Collective::kReduceScatter;
  const TensorView input{const_cast<void*>(call.send), scatters ? call.count * ranks : call.count,
                         *call.dtype()};
  const TensorView output{call.recv, call.count, *call.dtype()};
  const absl::Status status = reducer.Reduce(call.collective, input, output, *call.operation(),
                                             call.stream, Clock::now() + settings_.timeout);
  if (!status.ok()) means_.say(absl::StrCat("a compressed reduction failed: ", status.message()));
  return ResultOf(status);
}

void NcclShim::Observe(const NcclCall& call, NcclWay way) {
  int ranks = 1;
  if (means_.next.comm_count != nullptr) means_.next.comm_count(call.comm, &ranks);
  if (ranks == 1 && way == NcclWay::kCandidate) way = NcclWay::kAlone;
  observer_.Count(call, ranks, way);
}

NcclResult NcclShim::GroupStart() {
  ++open_groups;
  return Pass("ncclGroupStart", means_.next.group_start);
}

NcclResult NcclShim::GroupEnd() {
  open_groups = std::max(0, open_groups - 1);
  return Pass("ncclGroupEnd", means_.next.group_end);
}

NcclResult NcclShim::GroupSimulateEnd(void* estimate) {
  open_groups = std::max(0, open_groups - 1);
  return Pass("ncclGroupSimulateEnd", means_.next.group_simulate_end, estimate);
}

}  // namespace thinwire
