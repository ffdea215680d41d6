// NcclComm: one rank's NCCL communicator as a C++ object that never waits except where documented.
#ifndef THINWIRE_TRANSPORT_NCCL_NCCL_COMM_H_
#define THINWIRE_TRANSPORT_NCCL_NCCL_COMM_H_

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/device.h"
#include "transport/nccl/nccl_library.h"
#include "transport/planes.h"

namespace thinwire {

// The blocks that one rank sends and receives in an exchange: one for each rank, by rank.
struct NcclBlocks {
  std::span<const Bytes> send;
  std::span<const MutableBytes> recv;
};

// Not thread-safe except where documented.
class NcclComm {
 public:
  // Waits for all ranks, which have the same `id`. Unimplemented if NCCL refuses: it finds no
  // driver, or another rank uses this rank's GPU. DeadlineExceeded if ranks do not find one
  // another. The failure of `control`, which may be null, ends the wait too. most_ctas: thread
  // blocks that one of NCCL's kernels may occupy on the GPU; with kNcclDefault NCCL chooses.
  static absl::StatusOr<std::unique_ptr<NcclComm>> Make(std::shared_ptr<const NcclLibrary> nccl,
                                                        Membership members, const NcclUniqueId& id,
                                                        std::shared_ptr<Device> device,
                                                        Deadline deadline,
                                                        const ControlPlane* control = nullptr,
                                                        int most_ctas = kNcclDefault);
  // Wraps a communicator that the caller has made, and destroys. It may be a blocking one: NCCL
  // then takes each Launch at once.
  static std::unique_ptr<NcclComm> Borrow(std::shared_ptr<const NcclLibrary> nccl,
                                          Membership members, NcclHandle handle,
                                          std::shared_ptr<Device> device);
  // Aborts what Finish has not ended, unless it is borrowed, and waits a few seconds for the abort.
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  const NcclLibrary& nccl() const { return *nccl_; }
  const Membership& members() const { return members_; }

  // kOngoing: NCCL still works on the last Launch, and accepts no other one. Ask again with Poll.
  enum class Progress { kDone, kOngoing };

  // Queues exchanges on the stream, which all exchanges share, as one group: a single one as
  // ncclAllGather if its blocks have the layout that this requires (IsGatherInPlace), else each as
  // sends and receives; a single rank sends to itself. Several exchanges must all be sends and
  // receives: these match their peers' in the order of each pair of ranks, however each rank groups
  // them, whereas NCCL orders collectives on its own within a group.
  //
  // On a communicator that does not block, NCCL launches from a thread of its own, which takes less
  // than a nap. So Launch polls for a while; kOngoing means that NCCL takes longer.
  absl::StatusOr<Progress> Launch(std::span<const NcclBlocks> exchanges, void* stream);

  // The state of the last Launch; or an error, also of work queued before it.
  absl::StatusOr<Progress> Poll();

  // Allocates device memory by ncclMemAlloc, aligned to 256 bytes, and frees it. Any thread may
  // call them. They require registers() of the library.
  absl::StatusOr<void*> Allocate(size_t bytes) const;
  void Free(void* memory) const;
  // Registers memory, so that NCCL sends from it and receives into it without copies of its own.
  // Returns the argument for Deregister; null if NCCL makes no use of the registration.
  absl::StatusOr<void*> Register(void* memory, size_t bytes);
  // Call before the memory is freed. Abort does it for all memory.
  void Deregister(void* registration);

  // Begins to end all queued work, whatever its state, and returns. NCCL does it on a thread of its
  // own, since it waits there for the whole device, which another library's kernels may keep busy
  // forever. Afterwards call only the functions below.
  void Abort();
  // True once NCCL has ended: no block is written after that. Any thread may call it after Abort.
  bool HasEnded() const;
  // Waits a few seconds at most, after Abort, for HasEnded. If it returns false, memory that NCCL
  // may still write must never be freed.
  bool AwaitEnd() const;

  // The orderly end, when nothing is under way. Waits for NCCL until the deadline, then aborts.
  void Finish(Deadline deadline);

  // Keeps memory until the communicator has ended, since freeing waits for all work of the device,
  // including exchanges of other communicators whose peers may be waiting in the same way.
  void Keep(DeviceMemory memory) { kept_.push_back(std::move(memory)); }

 private:
  struct Ending;

  NcclComm(std::shared_ptr<const NcclLibrary> nccl, Membership members,
           std::shared_ptr<Device> device)
      : nccl_(std::move(nccl)), members_(members), device_(std::move(device)) {}

  NcclResult LaunchGroup(std::span<const NcclBlocks> exchanges, void* stream);
  void End(NcclResult (*how)(NcclHandle));
  absl::StatusOr<Progress> Explain(NcclResult result) const;
  absl::Status AwaitPeers(Deadline deadline, const ControlPlane* control = nullptr);

  const std::shared_ptr<const NcclLibrary> nccl_;
  const Membership members_;
  const std::shared_ptr<Device> device_;
  NcclHandle handle_ = nullptr;  // null: ended
  bool borrowed_ = false;
  std::vector<DeviceMemory> kept_;
  std::shared_ptr<Ending> ending_;  // null: not ending yet
};

// True if the blocks of all other ranks have one size and lie, in rank order, in one array with the
// block that is sent to everybody: algorithms lay out the blocks of a gather like that, on all
// ranks.
bool IsGatherInPlace(int rank, std::span<const Bytes> send, std::span<const MutableBytes> recv);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_NCCL_NCCL_COMM_H_
