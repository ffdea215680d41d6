// The control plane over Gloo: frames of one size on one slot, both ways with each peer.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_CONTROL_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_CONTROL_H_

#include <chrono>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/control_plane.h"
#include "transport/gloo/gloo_channel.h"
#include "transport/gloo/gloo_receiver.h"
#include "transport/gloo/gloo_shared.h"

namespace thinwire {

// Of a mesh that is not complete it has failed before anybody asks it for anything, and reaches
// those that are connected. Its destruction closes the connections, of the data plane as well.
class GlooControl final : public ControlPlane {
 public:
  // last_words: how long its destruction waits, after a failure, for frames that have not left.
  GlooControl(std::shared_ptr<GlooShared> shared, std::chrono::milliseconds last_words);
  ~GlooControl() override;

  const Membership& members() const override { return shared_->members(); }
  absl::Status Send(int to, const ControlFrame& frame) override;
  absl::StatusOr<ControlMessage> Receive() override { return receiver_.Receive(); }
  void Abort(absl::Status reason) override { shared_->Fail(reason); }
  void Flush(Deadline deadline) override;
  absl::Status status() const override { return shared_->status(); }

 private:
  const std::shared_ptr<GlooShared> shared_;
  const std::chrono::milliseconds last_words_;
  GlooReceiver receiver_;
  std::vector<std::unique_ptr<GlooChannel>> channels_;  // null where there is no connection
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_CONTROL_H_
