#include "schedule/engine/sequencing.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "schedule/collective/partition.h"

namespace thinwire {
namespace {

// A rank may be slow to come. Who waits for one that is stopped must still submit in time to be no
// late one itself.
constexpr std::chrono::milliseconds kLatencyPatience(
    2000);  // at most, and a quarter of the timeout
const absl::Duration kTurn = absl::Milliseconds(20);

double Now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

}  // namespace

Sequencing::Sequencing(const Options& options, Transport& transport, Executor& executor,
                       Lanes& lanes, FailureProtocol& failure, Records& records)
    : members_(transport.members()),
      control_(*transport.control),
      executor_(executor),
      lanes_(lanes),
      failure_(failure),
      records_(records),
      announced_(options.lanes),
      latency_patience_(std::min(kLatencyPatience, options.timeout / 4)),
      sequencer_(members_, options, transport.data->traits().matching,
                 HopShares(members_.size, options)) {}

template <typename Event>
void Sequencing::Handle(Event event) {
  {
    const absl::MutexLock lock(&mu_);
    event(sequencer_);
    if (carrying_ || sequencer_.outbox().empty()) return;
    carrying_ = true;
    std::swap(batch_, sequencer_.outbox());
  }
  for (bool more = true; more;) {
    for (const Action& action : batch_.actions()) CarryOut(action);
    batch_.Clear();
    const absl::MutexLock lock(&mu_);
    more = carrying_ = !sequencer_.outbox().empty();
    if (more) std::swap(batch_, sequencer_.outbox());
  }
}

void Sequencing::CarryOut(const Action& action) {
  if (failure_.failed()) return;
  switch (action.kind) {
    case Action::Kind::kStart:
      if (action.start.predicted) records_.AddPredicted();
      executor_.Start(action.start);
      break;
    case Action::Kind::kSend: Send(action.to, action.message); break;
    case Action::Kind::kPredicted:
      if (absl::Status status = lanes_.SetAtOnce(announced_ + action.at_once); !status.ok()) {
        failure_.Fail(std::move(status), FailureProtocol::Tell::kEveryone);
      }
      break;
    case Action::Kind::kFail:
      failure_.Fail(action.reason, FailureProtocol::Tell::kEveryone, action.silent);
      break;
  }
}

void Sequencing::Send(int to, const OrderMessage& message) {
  records_.Event(FlightEvent::kFrameOut, message.report.name, 0, to,
                 static_cast<uint64_t>(message.type));
  ForEachFrame(message, [&](const ControlFrame& frame) {
    for (int peer = 0; peer < members_.size; ++peer) {
      if (peer == members_.rank || (to != kEveryone && to != peer)) continue;
      // A failure here also ends the reader's Receive, which reports it.
      control_.Send(peer, frame).IgnoreError();
    }
  });
}

void Sequencing::Begin() {
  Handle([](Sequencer& s) { s.Begin(Now()); });
  const Deadline patience = Clock::now() + latency_patience_;
  bool measured = false;
  // In turns, since a group that fails meanwhile answers no more.
  while (!measured && !failure_.failed() && Clock::now() < patience) {
    const absl::MutexLock lock(&mu_);
    measured = mu_.AwaitWithTimeout(absl::Condition(&sequencer_, &Sequencer::measured), kTurn);
  }
}

void Sequencing::OnSubmit(const UsePtr& use) {
  Handle([&](Sequencer& s) { s.OnSubmit({use, &use->report}, Now(), use); });
}

void Sequencing::OnMessage(int from, const OrderMessage& message) {
  Handle([&](Sequencer& s) { s.OnMessage(from, message, Now()); });
}

void Sequencing::OnHopDone(const StartChunk& chunk) {
  Handle([&](Sequencer& s) { s.OnHopDone(chunk, Now()); });
}

void Sequencing::OnChunkDone(const StartChunk& chunk, bool last) {
  Handle([&](Sequencer& s) { s.OnChunkDone(chunk, last, Now()); });
}

void Sequencing::OnDirectDone(uint64_t id) {
  Handle([&](Sequencer& s) { s.OnDirectDone(id); });
}

void Sequencing::EndStep() {
  Handle([](Sequencer& s) { s.EndStep(Now()); });
}

void Sequencing::OnClock() {
  Handle([](Sequencer& s) { s.OnClock(Now()); });
}

std::string Sequencing::Describe() const {
  const absl::MutexLock lock(&mu_);
  return sequencer_.Describe();
}

}  // namespace thinwire
