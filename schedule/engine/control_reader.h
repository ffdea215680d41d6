// ControlReader: a thread that receives control frames, and hands each to whom it concerns: reports
// and orders to the sequencer, failures to the failure protocol, goodbyes to the farewell, digests
// to the replica check.
#ifndef THINWIRE_SCHEDULE_ENGINE_CONTROL_READER_H_
#define THINWIRE_SCHEDULE_ENGINE_CONTROL_READER_H_

#include <thread>

#include "schedule/engine/failure.h"
#include "schedule/engine/farewell.h"
#include "schedule/engine/flight_recorder.h"
#include "schedule/engine/replica_check.h"
#include "schedule/engine/sequencing.h"
#include "transport/control_plane.h"

namespace thinwire {

class ControlReader {
 public:
  // References outlive it. It ends when the control plane fails.
  ControlReader(ControlPlane& control, Sequencing& sequencing, FailureProtocol& failure,
                Farewell& farewell, ReplicaCheck& replicas, FlightRecorder& recorder);
  ~ControlReader() { thread_.join(); }

 private:
  void Run();
  void OnFrame(const ControlMessage& message);

  ControlPlane& control_;
  Sequencing& sequencing_;
  FailureProtocol& failure_;
  Farewell& farewell_;
  ReplicaCheck& replicas_;
  FlightRecorder& recorder_;
  std::thread thread_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_CONTROL_READER_H_
