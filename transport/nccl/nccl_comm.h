// NcclComm: one rank's communicator of NCCL, as an object of C++ that never waits but where it
// says.
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

// What one rank sends and receives in an exchange: a block for each rank, by rank.
struct NcclBlocks {
  std::span<const Bytes> send;
  std::span<const MutableBytes> recv;
};

// One thread at a time calls it.
class NcclComm {
 public:
  // Waits for all ranks, which have the same `id`. Unimplemented if NCCL refuses: it finds no
  // driver, or another rank's GPU is this one. DeadlineExceeded if ranks do not find one another.
  // The failure of `control`, which may be null, ends the wait as well. most_ctas: that a kernel of
  // NCCL's occupies on the GPU; kNcclDefault leaves it to NCCL.
  static absl::StatusOr<std::unique_ptr<NcclComm>> Make(std::shared_ptr<const NcclLibrary> nccl,
                                                        Membership members, const NcclUniqueId& id,
                                                        std::shared_ptr<Device> device,
                                                        Deadline deadline,
                                                        const ControlPlane* control = nullptr,
                                                        int most_ctas = kNcclDefault);
  // One that somebody else has made, and ends. It may be one that blocks: NCCL then takes each
  // Launch at once.
  static std::unique_ptr<NcclComm> Borrow(std::shared_ptr<const NcclLibrary> nccl,
                                          Membership members, NcclHandle handle,
                                          std::shared_ptr<Device> device);
  // Aborts what Finish has not ended, unless it is borrowed, and waits for that a few seconds.
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  const NcclLibrary& nccl() const { return *nccl_; }
  const Membership& members() const { return members_; }

  // kOngoing: NCCL still works on the last Launch, and takes no other one. Ask again by Poll.
  enum class Progress { kDone, kOngoing };

  // Queues exchanges on the stream, which all exchanges share, in one group: a single one as
  // ncclAllGather where its blocks lie as that requires (IsGatherInPlace), else each as sends and
  // receives; a rank that is alone sends to itself. Several must all be of sends and receives:
  // these meet their peers' in the order of each pair of ranks, however each rank groups them, and
  // NCCL gives collectives an order of its own within a group.
  //
  // On a communicator that does not block, NCCL launches from a thread of its own, which takes less
  // than a nap. So this asks for a while how it stands, and kOngoing means that NCCL takes longer.
  absl::StatusOr<Progress> Launch(std::span<const NcclBlocks> exchanges, void* stream);

  // How the last Launch stands; or an error, also of what has been queued before.
  absl::StatusOr<Progress> Poll();

  // Memory of the device by ncclMemAlloc, aligned to 256 bytes, and its end. Of any thread; the
  // library registers().
  absl::StatusOr<void*> Allocate(size_t bytes) const;
  void Free(void* memory) const;
  // Makes memory known, so that NCCL sends from it and receives into it without copies of its own.
  // Returns what Deregister wants; null if NCCL makes no use of it.
  absl::StatusOr<void*> Register(void* memory, size_t bytes);
  // Before the memory is freed. Abort does it for all memory.
  void Deregister(void* registration);

  // Begins to end all that is queued, wherever it stands, and returns. NCCL does it on a thread of
  // its own, since it waits there for the whole device, which another library's kernels may keep
  // busy for ever. Only the functions below follow.
  void Abort();
  // True once NCCL has ended: no block is written from here on. Of any thread, after Abort.
  bool HasEnded() const;
  // Waits for that a few seconds after Abort, and not longer. If it returns false, memory that NCCL
  // may still write must be kept for ever.
  bool AwaitEnd() const;

  // The orderly end, when nothing is under way. Waits for NCCL until the deadline, then aborts.
  void Finish(Deadline deadline);

  // Keeps memory until the communicator has ended, since freeing waits for all work of the device:
  // for other communicators' exchanges too, whose peers may be waiting in the same way.
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
  std::shared_ptr<Ending> ending_;  // null: it has not begun
};

// True if all foreign blocks are of one size and lie, in rank order, in one array with the block
// that is sent to everybody: as algorithms lay out the blocks of a gather, alike on all ranks.
bool IsGatherInPlace(int rank, std::span<const Bytes> send, std::span<const MutableBytes> recv);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_NCCL_NCCL_COMM_H_
