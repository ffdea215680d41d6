#ifndef THINWIRE_TRANSPORT_TIME_LEFT_H_
#define THINWIRE_TRANSPORT_TIME_LEFT_H_

#include "absl/time/time.h"
#include "transport/store.h"

namespace thinwire {

// The time left until a deadline, for absl::CondVar::WaitWithTimeout. That converts it to the
// system's clock, which may jump, so a wait that timed out has passed its deadline only if Clock
// says so too.
inline absl::Duration TimeLeft(Deadline deadline) {
  return absl::FromChrono(deadline - Clock::now());
}

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_TIME_LEFT_H_
