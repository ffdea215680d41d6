// NcclSession: one communicator of the program's in a process that has opted in: whether its
// allreduces go compressed, which its ranks agree on at the first that could, and then its reducer.
#ifndef THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_SESSION_H_
#define THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_SESSION_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "integrations/nccl_shim/nccl_agreement.h"
#include "integrations/nccl_shim/nccl_next.h"
#include "integrations/nccl_shim/nccl_reducer.h"
#include "integrations/nccl_shim/nccl_shim_settings.h"

namespace thinwire {

// The functions that the shim gets from its surroundings; tests have others.
struct NcclShimMeans {
  NcclNext next;
  std::function<absl::StatusOr<std::shared_ptr<const NcclLibrary>>()> load_nccl;
  std::function<absl::StatusOr<std::shared_ptr<Device>>(int ordinal)> open_device;
  std::function<void(const std::string& line)> say;  // from any thread
};

// NCCL wants one thread at a time to use a communicator, and so does this.
class NcclSession {
 public:
  // The settings and means outlive it. `twin` is the id under which its ranks meet.
  NcclSession(const NcclShimSettings& settings, const NcclShimMeans& means, Membership members,
              NcclHandle handle, const NcclUniqueId& twin)
      : settings_(settings), means_(means), members_(members), handle_(handle), twin_(twin) {}

  // True while a graph is captured from the stream: then nothing may be queued that is not to be
  // played again.
  bool IsCapturing(void* stream);

  // Null: allreduces pass. The first call waits for the other ranks until the deadline; they all
  // get the same answer, and say so.
  NcclReducer* reducer();

 private:
  Device* device();  // null: it can't be used
  absl::Status Agree();
  absl::StatusOr<std::string> Terms() const;  // that all ranks must have alike
  absl::StatusOr<std::unique_ptr<NcclReducer>> MakeReducer(
      std::shared_ptr<const NcclLibrary> nccl) const;

  const NcclShimSettings& settings_;
  const NcclShimMeans& means_;
  const Membership members_;
  const NcclHandle handle_;
  const NcclUniqueId twin_;
  absl::StatusOr<std::shared_ptr<Device>> device_{nullptr};  // null: not looked for yet
  bool asked_ = false, agreed_ = false;
  AgreementRemains remains_;
  std::unique_ptr<NcclReducer> reducer_;  // kept for its memory's sake where ranks did not agree
};

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_SESSION_H_
