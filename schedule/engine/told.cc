#include "schedule/engine/told.h"

#include <optional>

#include "schedule/order/frames.h"

namespace thinwire {

absl::Status ToldReason(ControlPlane& control, std::vector<bool>* heard_from) {
  for (;;) {
    const absl::StatusOr<ControlMessage> message = control.Receive();
    if (!message.ok()) return absl::OkStatus();
    if (heard_from != nullptr) (*heard_from)[message->from] = true;
    const std::optional<ParsedFrame> parsed = ParseFrame(message->frame);
    if (parsed.has_value() && !parsed->failure.ok()) return parsed->failure;
  }
}

}  // namespace thinwire
