// NcclSession: one communicator of the program's in a process that has opted in: whether its
// allreduces go compressed, which its ranks agree on at the first that could, and then its reducer.
#ifndef THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_SESSION_H_
#define THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_SESSION_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "integrations/nccl_shim/nccl_meeting.h"
#include "integrations/nccl_shim/nccl_next.h"
#include "integrations/nccl_shim/nccl_reducer.h"
#include "integrations/nccl_shim/nccl_shim_settings.h"
#include "schedule/join/links.h"

namespace thinwire {

// The functions that the shim gets from its surroundings; tests have others.
struct NcclShimMeans {
  NcclNext next;
  std::function<absl::StatusOr<std::shared_ptr<const NcclLibrary>>()> load_nccl;
  std::function<absl::StatusOr<std::shared_ptr<Device>>(int ordinal)> open_device;
  std::function<void(const std::string& line)> say;  // from any thread
  std::string node = NodeIdentity();                 // text that is equal in ranks of one node
};

// NCCL wants one thread at a time to use a communicator, and so does this.
class NcclSession {
 public:
  // The settings and means outlive it. Its ranks agree at the meeting.
  NcclSession(const NcclShimSettings& settings, const NcclShimMeans& means, Membership members,
              NcclHandle handle, MeetingPlace meeting)
      : settings_(settings),
        means_(means),
        members_(members),
        handle_(handle),
        meeting_(std::move(meeting)) {}

  // True while a graph is captured from the stream: then nothing may be queued that is not to be
  // played again.
  bool IsCapturing(void* stream);

  int size() const { return members_.size; }

  // Null: reductions pass. The first call waits for the other ranks until the deadline; they all
  // get the same answer, and say so.
  NcclReducer* reducer();

 private:
  Device* device();  // null: it can't be used
  absl::Status Agree();
  // Where the ranks are, if all take part on the same terms.
  absl::StatusOr<Nodes> AgreeOnTerms();
  absl::Status MakeReducer(const Nodes& nodes);

  const NcclShimSettings& settings_;
  const NcclShimMeans& means_;
  const Membership members_;
  const NcclHandle handle_;
  const MeetingPlace meeting_;
  absl::StatusOr<std::shared_ptr<Device>> device_{nullptr};  // null: not looked for yet
  bool asked_ = false, agreed_ = false;
  std::unique_ptr<NcclReducer> reducer_;  // kept for its memory's sake where ranks did not agree
};

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_SESSION_H_
