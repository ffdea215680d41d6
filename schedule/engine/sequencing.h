// Sequencing: the engine's host of a sequencer. It gives it the time and one caller at a time, and
// carries out its outbox in order, with no lock held.
#ifndef THINWIRE_SCHEDULE_ENGINE_SEQUENCING_H_
#define THINWIRE_SCHEDULE_ENGINE_SEQUENCING_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "schedule/engine/ending.h"
#include "schedule/engine/executor.h"
#include "schedule/engine/lane.h"
#include "schedule/engine/records.h"
#include "schedule/engine/tensors.h"
#include "schedule/order/sequencer.h"
#include "transport/planes.h"

namespace thinwire {

// Thread-safe.
class Sequencing {
 public:
  // References outlive it; frames go to the transport's control plane, chunks to `executor`,
  // whose lanes are of `lanes`, failures to `failure`.
  Sequencing(const Options& options, Transport& transport, Executor& executor, Lanes& lanes,
             FailureProtocol& failure, Records& records);

  // Rank 0 measures its peers' latency, and waits for their answers, a while.
  void Begin();

  // The use comes back with each of its chunks that starts.
  void OnSubmit(const UsePtr& use);
  void OnMessage(int from, const OrderMessage& message);
  void OnHopDone(const StartChunk& chunk);
  void OnChunkDone(const StartChunk& chunk, bool last);
  void OnDirectDone(uint64_t id);
  void EndStep();
  void OnClock();

  std::string Describe() const;

 private:
  template <typename Event>
  void Handle(Event event);
  void CarryOut(const Action& action);
  void Send(int to, const OrderMessage& message);

  const Membership members_;
  ControlPlane& control_;
  Executor& executor_;
  Lanes& lanes_;
  FailureProtocol& failure_;
  Records& records_;
  const int announced_;  // chunks at once
  const std::chrono::milliseconds latency_patience_;
  mutable absl::Mutex mu_;
  Sequencer sequencer_ ABSL_GUARDED_BY(mu_);
  // Somebody is carrying out what came before; whoever comes meanwhile leaves its part to them.
  bool carrying_ ABSL_GUARDED_BY(mu_) = false;
  Outbox batch_;  // of whoever has set carrying_
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_SEQUENCING_H_
