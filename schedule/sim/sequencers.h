// Sequencers: one sequencer per rank, the same class as in the engine, on the virtual clock.
// Messages take a latency, and a chunk's exchange begins when all ranks have started it.
#ifndef THINWIRE_SCHEDULE_SIM_SEQUENCERS_H_
#define THINWIRE_SCHEDULE_SIM_SEQUENCERS_H_

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "schedule/order/sequencer.h"
#include "schedule/sim/events.h"
#include "schedule/sim/lanes.h"
#include "schedule/sim/wire.h"

namespace thinwire::sim {

class Sequencers {
 public:
  // References must outlive this object.
  Sequencers(const Setting& setting, const Wire& wire, Events& events, Lanes& lanes);

  // Rank 0 measures its peers' latency; runs the clock until it is known.
  void Begin();
  // The rank has computed the unit's gradient.
  void OnReady(int rank, uint32_t unit, int step);
  // A rank has submitted all of a step.
  void EndStep(int rank);
  // A hop of a chunk is done, on all ranks.
  void OnHopDone(const ChunkId& id);
  // A chunk is done, on all ranks.
  void OnDone(const ChunkId& id);

  // The first failure of any rank, or OK; a failed simulation does not finish.
  const absl::Status& status() const { return status_; }
  // The number that rank 0 has sent and received since Begin.
  double control_frames() const { return control_frames_; }

 private:
  // A tensor: a unit in a step.
  struct Tensor {
    std::shared_ptr<const Report> report;  // shared by all ranks
    uint32_t unit = 0;
    int step = 0;
    uint32_t chunks_left = 0;
    std::vector<int> started;  // number of ranks, by chunk
    std::vector<StartChunk> starts;
  };

  // A message on its way: to one rank, or an order of chunks to several that receive it at once.
  struct Sent {
    int from = 0;
    std::vector<int> to;
    double due = 0.0;
    OrderMessage message;
  };

  Report ReportOf(uint32_t unit, int step) const;
  template <typename Event>
  void Handle(int rank, Event event);
  void CarryOut(int rank, const Outbox& outbox);
  void Start(const StartChunk& start);
  Sent* Send(int from, const Action& action, Sent* before);
  void Deliver(const Sent& sent);

  const Setting& setting_;
  const Wire& wire_;
  Events& events_;
  Lanes& lanes_;
  TensorBook book_;  // of all ranks
  std::vector<std::unique_ptr<Sequencer>> ranks_;
  std::unordered_map<uint64_t, Tensor> tensors_;  // by id, from OnReady to the last OnDone
  std::vector<Server> heads_;  // of control frames, by rank; rank 0's are handled by Lanes
  double control_frames_ = 0;
  absl::Status status_;
  // Memory that is reused.
  Outbox outbox_;  // of all ranks, in turn
  std::vector<std::unique_ptr<Sent>> sent_;
  std::vector<Sent*> spare_sent_;
};

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_SEQUENCERS_H_
