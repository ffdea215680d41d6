#include "schedule/engine/control_reader.h"

#include <optional>

namespace thinwire {

ControlReader::ControlReader(ControlPlane& control, Sequencing& sequencing,
                             FailureProtocol& failure, Farewell& farewell, ReplicaCheck& replicas,
                             FlightRecorder& recorder)
    : control_(control),
      sequencing_(sequencing),
      failure_(failure),
      farewell_(farewell),
      replicas_(replicas),
      recorder_(recorder),
      thread_([this] { Run(); }) {}

void ControlReader::Run() {
  for (;;) {
    const absl::StatusOr<ControlMessage> message = control_.Receive();
    if (!message.ok()) return farewell_.OnControlLost(message.status());
    OnFrame(*message);
  }
}

void ControlReader::OnFrame(const ControlMessage& message) {
  const std::optional<ParsedFrame> parsed = ParseFrame(message.frame);
  if (!parsed.has_value()) {
    return failure_.Fail(
        absl::FailedPreconditionError("a peer sent a control frame of an unknown version"),
        FailureProtocol::Tell::kEveryone);
  }
  const Message& content = parsed->message;
  recorder_.Record(FlightEvent::kFrameIn, content.report.name, 0, message.from,
                   static_cast<uint64_t>(content.type));
  switch (content.type) {
    case FrameType::kFail: return failure_.OnPeerFailed(parsed->failure, parsed->silent);
    case FrameType::kBye: return farewell_.OnBye(message.from, parsed->started);
    case FrameType::kByeHeard: return farewell_.OnByeHeard(message.from);
    case FrameType::kDigest: return replicas_.OnDigest(message.from, parsed->digest);
    case FrameType::kPong: farewell_.OnPong(message.from); [[fallthrough]];
    default: return sequencing_.OnMessage(message.from, content);
  }
}

}  // namespace thinwire
