// FailureLink: makes the failure of a control plane that of a data plane over other connections,
// while nobody receives the control plane's frames yet.
#ifndef THINWIRE_TRANSPORT_FAILURE_LINK_H_
#define THINWIRE_TRANSPORT_FAILURE_LINK_H_

#include "absl/status/status.h"
#include "transport/control_plane.h"
#include "transport/data_plane.h"
#include "transport/ticker.h"

namespace thinwire {

// Both planes must outlive it. A peer that is gone ends the data plane's waits within moments.
class FailureLink {
 public:
  FailureLink(const ControlPlane& control, DataPlane& data)
      : ticker_([&control, &data] {
          if (absl::Status failure = control.status(); !failure.ok()) data.Abort(failure);
        }) {}

 private:
  Ticker ticker_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_FAILURE_LINK_H_
