#include "transport/nccl/nccl_comm.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "transport/steady_cond_var.h"
#include "transport/store.h"

namespace thinwire {
namespace {

constexpr std::chrono::microseconds kPause(200);  // between polls that are not urgent
// Polls before the first nap. A launch takes less time than the shortest nap: decision 26.
constexpr int kQuestions = 500;
// How long NCCL may take to end aborted kernels and itself.
constexpr std::chrono::seconds kEndPatience(5);

std::string TextOf(const NcclLibrary& nccl, NcclHandle handle, NcclResult result) {
  return absl::StrCat("NCCL ", nccl.version, ": ", nccl.get_error_string(result), " (",
                      nccl.get_last_error(handle), ")");
}

}  // namespace

// State that the thread which ends a communicator shares with its owner, which may be destroyed
// first.
struct NcclComm::Ending {
  const Deadline patience = Clock::now() + kEndPatience;
  absl::Mutex mu;
  bool done ABSL_GUARDED_BY(mu) = false;   // NCCL has ended
  bool freed ABSL_GUARDED_BY(mu) = false;  // and the memory kept for it is freed
  SteadyCondVar changed;
};

bool IsGatherInPlace(int rank, std::span<const Bytes> send, std::span<const MutableBytes> recv) {
  const MutableBytes& own = recv[rank];
  if (own.empty()) return false;
  const uint8_t* const begin = own.data() - rank * own.size();
  for (size_t r = 0; r < recv.size(); ++r) {
    if (recv[r].data() != begin + r * own.size() || recv[r].size() != own.size()) return false;
    if (static_cast<int>(r) == rank) continue;
    if (send[r].data() != own.data() || send[r].size() != own.size()) return false;
  }
  return true;
}

absl::StatusOr<std::unique_ptr<NcclComm>> NcclComm::Make(
    std::shared_ptr<const NcclLibrary> nccl, Membership members, const NcclUniqueId& id,
    std::shared_ptr<Device> device, Deadline deadline, const ControlPlane* control, int most_ctas) {
  std::unique_ptr<NcclComm> comm(new NcclComm(std::move(nccl), members, std::move(device)));
  NcclConfig config;
  config.max_ctas = most_ctas;
  NcclResult result = kNcclOk;
  const absl::Status on_device = comm->device_->RunOn([&] {
    result =
        comm->nccl_->comm_init_rank_config(&comm->handle_, members.size, id, members.rank, &config);
  });
  if (!on_device.ok()) return on_device;
  const bool begun = result == kNcclOk || result == kNcclInProgress;
  absl::Status status =
      begun ? comm->AwaitPeers(deadline, control) : comm->Explain(result).status();
  if (status.ok()) return comm;
  const bool is_peers_fault = control != nullptr && !control->status().ok();
  if (absl::IsDeadlineExceeded(status) || is_peers_fault) return status;
  return absl::UnimplementedError(absl::StrCat(status.message(), ", on ", comm->device_->name()));
}

std::unique_ptr<NcclComm> NcclComm::Borrow(std::shared_ptr<const NcclLibrary> nccl,
                                           Membership members, NcclHandle handle,
                                           std::shared_ptr<Device> device) {
  std::unique_ptr<NcclComm> comm(new NcclComm(std::move(nccl), members, std::move(device)));
  comm->handle_ = handle;
  comm->borrowed_ = true;
  return comm;
}

absl::Status NcclComm::AwaitPeers(Deadline deadline, const ControlPlane* control) {
  for (;;) {
    const absl::StatusOr<Progress> progress = Poll();
    if (!progress.ok()) return progress.status();
    if (*progress == Progress::kDone) return absl::OkStatus();
    if (control != nullptr && !control->status().ok()) return control->status();
    if (Clock::now() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat(
          "rank ", members_.rank, " of ", members_.size,
          " did not find its peers over NCCL in time. NCCL makes connections of its own: see what "
          "NCCL_DEBUG=INFO says, name an interface in NCCL_SOCKET_IFNAME, or set transport to "
          "gloo"));
    }
    std::this_thread::sleep_for(kPause);
  }
}

NcclComm::~NcclComm() {
  if (borrowed_) return;
  if (handle_ != nullptr) Abort();
  if (ending_ == nullptr) return;
  const absl::MutexLock lock(&ending_->mu);
  while (!ending_->freed && Clock::now() < ending_->patience) {
    ending_->changed.WaitUntil(&ending_->mu, ending_->patience);
  }
}

absl::StatusOr<NcclComm::Progress> NcclComm::Launch(std::span<const NcclBlocks> exchanges,
                                                    void* stream) {
  NcclResult result = kNcclOk;
  const absl::Status on_device = device_->RunOn([&] { result = LaunchGroup(exchanges, stream); });
  if (!on_device.ok()) return on_device;
  absl::StatusOr<Progress> progress = Explain(result);
  for (int i = 0; i < kQuestions && progress.ok() && *progress == Progress::kOngoing; ++i) {
    progress = Poll();
    std::this_thread::yield();
  }
  return progress;
}

// Each rank begins with a different peer. The group is always ended, since it is state of the
// thread.
NcclResult NcclComm::LaunchGroup(std::span<const NcclBlocks> exchanges, void* stream) {
  const auto [rank, size] = members_;
  NcclResult result = nccl_->group_start();
  const auto add = [&result](NcclResult added) {
    if (result == kNcclOk && added != kNcclInProgress) result = added;
  };
  for (const auto& [send, recv] : exchanges) {
    if (size > 1 && IsGatherInPlace(rank, send, recv)) {
      const size_t bytes = recv[rank].size();
      add(nccl_->all_gather(recv[rank].data(), recv[0].data(), bytes, kNcclBytes, handle_, stream));
      continue;
    }
    for (int i = size > 1 ? 1 : 0; i < size; ++i) {
      const int to = (rank + i) % size, from = (rank + size - i) % size;
      if (!send[to].empty()) {
        add(nccl_->send(send[to].data(), send[to].size(), kNcclBytes, to, handle_, stream));
      }
      if (!recv[from].empty()) {
        add(nccl_->recv(recv[from].data(), recv[from].size(), kNcclBytes, from, handle_, stream));
      }
    }
  }
  const NcclResult ended = nccl_->group_end();
  return result == kNcclOk ? ended : result;
}

absl::StatusOr<NcclComm::Progress> NcclComm::Poll() {
  NcclResult state = kNcclOk;
  const NcclResult asked = nccl_->comm_get_async_error(handle_, &state);
  return Explain(asked == kNcclOk ? state : asked);
}

absl::StatusOr<NcclComm::Progress> NcclComm::Explain(NcclResult result) const {
  if (result == kNcclOk) return Progress::kDone;
  if (result == kNcclInProgress) return Progress::kOngoing;
  const std::string text =
      absl::StrCat("rank ", members_.rank, ": ", TextOf(*nccl_, handle_, result),
                   "; run with NCCL_DEBUG=INFO to learn more, or set transport to gloo");
  const bool lost = result == kNcclRemoteError || result == kNcclSystemError;
  return lost ? absl::UnavailableError(text) : absl::InternalError(text);
}

absl::StatusOr<void*> NcclComm::Allocate(size_t bytes) const {
  void* memory = nullptr;
  NcclResult result = kNcclOk;
  const absl::Status on_device = device_->RunOn([&] { result = nccl_->mem_alloc(&memory, bytes); });
  if (!on_device.ok()) return on_device;
  if (result == kNcclOk) return memory;
  return absl::ResourceExhaustedError(absl::StrCat(
      "no ", bytes, " bytes of ", device_->name(), " for rank ", members_.rank, ": ",
      TextOf(*nccl_, handle_, result), "; free some (torch.cuda.empty_cache() returns what torch ",
      "keeps unused), or take smaller or fewer chunks (chunk_bytes, lanes)"));
}

void NcclComm::Free(void* memory) const {
  device_->RunOn([&] { nccl_->mem_free(memory); }).IgnoreError();
}

absl::StatusOr<void*> NcclComm::Register(void* memory, size_t bytes) {
  void* registration = nullptr;
  NcclResult result = kNcclOk;
  const absl::Status on_device =
      device_->RunOn([&] { result = nccl_->comm_register(handle_, memory, bytes, &registration); });
  if (!on_device.ok()) return on_device;
  if (result == kNcclOk) return registration;
  return absl::InternalError(absl::StrCat(
      "rank ", members_.rank, ": ", TextOf(*nccl_, handle_, result), " when ", bytes,
      " bytes were registered; set NCCL_LOCAL_REGISTER=0 on all ranks, or transport to gloo"));
}

// The result is ignored: the memory is freed in any case.
void NcclComm::Deregister(void* registration) {
  device_->RunOn([&] { nccl_->comm_deregister(handle_, registration); }).IgnoreError();
}

// The thread owns all that NCCL may use until it has ended. NCCL's result is ignored: the
// communicator is gone.
void NcclComm::End(NcclResult (*how)(NcclHandle)) {
  ending_ = std::make_shared<Ending>();
  std::thread([how, nccl = nccl_, device = device_, handle = std::exchange(handle_, nullptr),
               kept = std::exchange(kept_, {}), ending = ending_]() mutable {
    device->RunOn([&] { how(handle); }).IgnoreError();
    {
      const absl::MutexLock lock(&ending->mu);
      ending->done = true;
      ending->changed.SignalAll();
    }
    kept.clear();  // waits for other libraries' kernels too
    device.reset();
    const absl::MutexLock lock(&ending->mu);
    ending->freed = true;
    ending->changed.SignalAll();
  }).detach();
}

void NcclComm::Abort() { End(nccl_->comm_abort); }

bool NcclComm::HasEnded() const {
  const absl::MutexLock lock(&ending_->mu);
  return ending_->done;
}

bool NcclComm::AwaitEnd() const {
  const absl::MutexLock lock(&ending_->mu);
  while (!ending_->done && Clock::now() < ending_->patience) {
    ending_->changed.WaitUntil(&ending_->mu, ending_->patience);
  }
  return ending_->done;
}

void NcclComm::Finish(Deadline deadline) {
  const NcclResult begun = nccl_->comm_finalize(handle_);
  if ((begun != kNcclOk && begun != kNcclInProgress) || !AwaitPeers(deadline).ok()) return Abort();
  End(nccl_->comm_destroy);
}

}  // namespace thinwire
