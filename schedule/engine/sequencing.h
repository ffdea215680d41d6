// Sequencing: the engine's host of a sequencer. It gives it the time and one caller at a time, and
// carries out its outbox in order, with no lock held.
#ifndef THINWIRE_SCHEDULE_ENGINE_SEQUENCING_H_
#define THINWIRE_SCHEDULE_ENGINE_SEQUENCING_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "schedule/engine/executor.h"
#include "schedule/engine/failure.h"
#include "schedule/engine/flight_recorder.h"
#include "schedule/order/sequencer.h"

namespace thinwire {

// Thread-safe.
class Sequencing {
 public:
  // References outlive it; frames go to `control`, chunks to `executor`, failures to `failure`.
  Sequencing(const Membership& members, const Options& options, Matching matching,
             ControlPlane& control, Executor& executor, FailureProtocol& failure,
             FlightRecorder& recorder);

  // Rank 0 measures its peers' latency, and waits for their answers, a while.
  void Begin();

  void OnSubmit(const Report& report);
  void OnMessage(int from, const Message& message);
  void OnChunkDone(const StartChunk& chunk, bool last);
  void OnDirectDone(uint64_t id);
  void EndStep();
  void OnClock();

  uint64_t predicted_chunks() const { return predicted_chunks_; }
  std::string Describe() const;

 private:
  template <typename Event>
  void Handle(Event event);
  void CarryOut(const Action& action);
  void Send(int to, const Message& message);

  const Membership members_;
  ControlPlane& control_;
  Executor& executor_;
  FailureProtocol& failure_;
  FlightRecorder& recorder_;
  const std::chrono::milliseconds latency_patience_;
  std::atomic<uint64_t> predicted_chunks_{0};
  mutable absl::Mutex mu_;
  Sequencer sequencer_ ABSL_GUARDED_BY(mu_);
  // Somebody is carrying out what came before; whoever comes meanwhile leaves its part to them.
  bool carrying_ ABSL_GUARDED_BY(mu_) = false;
  Outbox batch_;  // of whoever has set carrying_
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_SEQUENCING_H_
