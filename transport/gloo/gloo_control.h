// The control plane over Gloo: frames of one size on one slot, both ways with each peer.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_CONTROL_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_CONTROL_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/control_plane.h"
#include "transport/gloo/gloo_channel.h"
#include "transport/gloo/gloo_receiver.h"
#include "transport/gloo/gloo_shared.h"

namespace thinwire {

// Its destruction closes the connections, of the data plane as well.
class GlooControl final : public ControlPlane {
 public:
  explicit GlooControl(std::shared_ptr<GlooShared> shared);
  ~GlooControl() override;

  const Membership& members() const override { return shared_->members(); }
  absl::Status Send(int to, const ControlFrame& frame) override {
    return channels_[to]->Send(frame);
  }
  absl::StatusOr<ControlMessage> Receive() override { return receiver_.Receive(); }
  void Abort(absl::Status reason) override { shared_->Fail(reason); }
  void Flush(Deadline deadline) override;
  absl::Status status() const override { return shared_->status(); }

 private:
  const std::shared_ptr<GlooShared> shared_;
  GlooReceiver receiver_;
  std::vector<std::unique_ptr<GlooChannel>> channels_;  // null at the own rank
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_CONTROL_H_
