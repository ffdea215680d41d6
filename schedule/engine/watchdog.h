// Watchdog: a thread that lets the sequencer look at the time, keeps the pulse, and carries a
// failure through.
#ifndef THINWIRE_SCHEDULE_ENGINE_WATCHDOG_H_
#define THINWIRE_SCHEDULE_ENGINE_WATCHDOG_H_

#include <functional>
#include <thread>
#include <utility>

#include "absl/time/time.h"
#include "schedule/engine/failure.h"
#include "schedule/engine/pulse.h"

namespace thinwire {

class Watchdog {
 public:
  // Calls tick() every 20 ms until the group fails, and then end(), once. Its destructor waits for
  // that: a group that ends fails first.
  Watchdog(FailureProtocol& failure, Pulse& pulse, std::function<void()> tick,
           std::function<void()> end)
      : thread_([&failure, &pulse, tick = std::move(tick), end = std::move(end)] {
          do {
            pulse.Beat(Clock::now());
            tick();
          } while (!failure.AwaitFailure(absl::Milliseconds(20)));
          end();
        }) {}
  ~Watchdog() { thread_.join(); }

 private:
  std::thread thread_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_WATCHDOG_H_
