// Standstill: whether this process stood still. One that was stopped (by SIGSTOP, a debugger or a
// frozen container) finds on waking that its peers have given it up, and would take them for lost.
#ifndef THINWIRE_SCHEDULE_ENGINE_STANDSTILL_H_
#define THINWIRE_SCHEDULE_ENGINE_STANDSTILL_H_

#include <chrono>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "transport/store.h"

namespace thinwire {

// Thread-safe.
class Standstill {
 public:
  // A standstill counts from a quarter of the timeout on, and from half a second on; it explains
  // failures until a timeout after its end.
  explicit Standstill(std::chrono::milliseconds timeout);

  // To be called every few milliseconds.
  void Beat(Deadline now);

  // The reason why rank `rank`, this one, failed. If it stood still, the words say so, and peers
  // that are gone are no lost peers but a passed deadline.
  absl::Status Explain(int rank, const absl::Status& reason, Deadline now) const;

 private:
  std::chrono::duration<double> Lasted(Deadline now) const;

  const std::chrono::milliseconds timeout_, counts_;
  mutable absl::Mutex mu_;
  std::optional<Deadline> last_ ABSL_GUARDED_BY(mu_);  // beat
  std::optional<Deadline> woke_ ABSL_GUARDED_BY(mu_);  // from the last standstill
  std::chrono::duration<double> stood_ ABSL_GUARDED_BY(mu_){0};
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_STANDSTILL_H_
