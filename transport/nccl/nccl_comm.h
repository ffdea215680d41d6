// NcclComm: one rank's communicator of NCCL, as an object of C++ that never waits but where it
// says.
#ifndef THINWIRE_TRANSPORT_NCCL_NCCL_COMM_H_
#define THINWIRE_TRANSPORT_NCCL_NCCL_COMM_H_

#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/device.h"
#include "transport/control_plane.h"
#include "transport/data_plane.h"
#include "transport/nccl/nccl_library.h"

namespace thinwire {

// One thread at a time calls it.
class NcclComm {
 public:
  // Waits for all ranks, which have the same `id`. Unimplemented if NCCL refuses: it finds no
  // driver, or another rank's GPU is this one. DeadlineExceeded if ranks do not find one another.
  // The failure of `control`, which may be null, ends the wait as well.
  static absl::StatusOr<std::unique_ptr<NcclComm>> Make(std::shared_ptr<const NcclLibrary> nccl,
                                                        Membership members, const NcclUniqueId& id,
                                                        Device& device, Deadline deadline,
                                                        const ControlPlane* control = nullptr);
  // One that somebody else has made, and ends. It may be one that blocks: NCCL then takes each
  // Launch at once.
  static std::unique_ptr<NcclComm> Borrow(std::shared_ptr<const NcclLibrary> nccl,
                                          Membership members, NcclHandle handle, Device& device);
  // Aborts what Finish has not ended, unless it is borrowed.
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  const NcclLibrary& nccl() const { return *nccl_; }
  const Membership& members() const { return members_; }

  // kOngoing: NCCL still works on the last Launch, and takes no other one. Ask again by Poll.
  enum class Progress { kDone, kOngoing };

  // Queues an exchange on the stream, which all exchanges share: as one ncclAllGather where the
  // blocks lie as that wants them (IsGatherInPlace), else as sends and receives of one group.
  absl::StatusOr<Progress> Launch(std::span<const Bytes> send, std::span<const MutableBytes> recv,
                                  void* stream);

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

  // Ends all that is queued, wherever it stands: its blocks are no longer written once the stream
  // has come to its end. No other call follows.
  void Abort();

  // The orderly end, when nothing is under way. Waits for NCCL until the deadline, then aborts.
  void Finish(Deadline deadline);

 private:
  NcclComm(std::shared_ptr<const NcclLibrary> nccl, Membership members, Device& device)
      : nccl_(std::move(nccl)), members_(members), device_(device) {}

  NcclResult LaunchGroup(std::span<const Bytes> send, std::span<const MutableBytes> recv,
                         void* stream);
  absl::StatusOr<Progress> Explain(NcclResult result) const;
  absl::Status AwaitPeers(Deadline deadline, const ControlPlane* control = nullptr);

  const std::shared_ptr<const NcclLibrary> nccl_;
  const Membership members_;
  Device& device_;
  NcclHandle handle_ = nullptr;  // null: ended
  bool borrowed_ = false;
};

// True if all foreign blocks are of one size and lie, in rank order, in one array with the block
// that is sent to everybody: as algorithms lay out the blocks of a gather, alike on all ranks.
bool IsGatherInPlace(int rank, std::span<const Bytes> send, std::span<const MutableBytes> recv);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_NCCL_NCCL_COMM_H_
