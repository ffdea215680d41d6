#include "schedule/engine/give_up.h"

#include "schedule/engine/told.h"
#include "schedule/order/frames.h"

namespace thinwire {

absl::Status GiveUp(Transport& transport, absl::Status reason) {
  ControlPlane& control = *transport.control;
  const bool failed_before = !control.status().ok();
  control.Abort(reason);
  if (failed_before) {
    if (absl::Status told = ToldReason(control); !told.ok()) reason = told;
  }
  control.SendToAll(PackFailure(reason));
  transport.Reset();
  return reason;
}

}  // namespace thinwire
