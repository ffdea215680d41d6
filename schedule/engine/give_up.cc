#include "schedule/engine/give_up.h"

#include <optional>

#include "schedule/order/frames.h"

namespace thinwire {
namespace {

// The first failure among the frames that have come. The plane has failed, so this does not wait.
absl::Status ToldReason(ControlPlane& control) {
  for (;;) {
    const absl::StatusOr<ControlMessage> message = control.Receive();
    if (!message.ok()) return absl::OkStatus();
    const std::optional<ParsedFrame> parsed = ParseFrame(message->frame);
    if (parsed.has_value() && !parsed->failure.ok()) return parsed->failure;
  }
}

}  // namespace

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
