// Alarm: fails a transport once a deadline has passed, and so ends waits that have none of their
// own. Gloo closes all connections when a wait of its own times out, and then a rank could not tell
// its peers why.
#ifndef THINWIRE_TRANSPORT_ALARM_H_
#define THINWIRE_TRANSPORT_ALARM_H_

#include "absl/status/status.h"
#include "transport/control_plane.h"
#include "transport/store.h"
#include "transport/ticker.h"

namespace thinwire {

// The plane, which must outlive it, fails with DeadlineExceeded.
class Alarm {
 public:
  Alarm(ControlPlane& control, Deadline deadline)
      : ticker_([&control, deadline] {
          if (Clock::now() < deadline) return;
          control.Abort(absl::DeadlineExceededError("the deadline has passed"));
        }) {}

 private:
  Ticker ticker_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_ALARM_H_
