#include "schedule/engine/farewell.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

using Tell = FailureProtocol::Tell;

constexpr double kPause_s = 0.1;  // between two questions whether a peer is there
const absl::Duration kTurn = absl::Milliseconds(20);

double Seconds(std::chrono::nanoseconds duration) { return 1e-9 * duration.count(); }

}  // namespace

Farewell::Farewell(const Membership& members, std::chrono::milliseconds timeout,
                   ControlPlane* control, FailureProtocol& failure)
    : members_(members),
      timeout_(timeout),
      control_(control),
      failure_(failure),
      peers_(members.size),
      roll_(members.size, kPause_s, AnswerPatience(Seconds(timeout))) {
  peers_[members.rank].needs_nothing = true;
}

absl::Status Farewell::Reason() const {
  return absl::UnavailableError(
      absl::StrCat("rank ", first_, " closed its communicator after ", counted_,
                   " collectives, and rank ", members_.rank, " has started ", started_,
                   "; let every rank make the same calls before one of them closes"));
}

void Farewell::OnStarted(uint64_t started) {
  absl::Status reason;
  {
    const absl::MutexLock lock(&mu_);
    started_ = std::max(started_, started);
    if (!IsCut()) return;
    reason = Reason();
  }
  failure_.Fail(reason, Tell::kEveryone);
}

void Farewell::OnFinished() {
  std::vector<int> peers;
  {
    const absl::MutexLock lock(&mu_);
    ++finished_;
    if (byes_ == 0) return;
    peers = TakeFinishedFor();
  }
  TellFinished(peers);
}

// The peers that have said goodbye, and are now to hear that this rank needs nothing of them.
std::vector<int> Farewell::TakeFinishedFor() {
  std::vector<int> peers;
  for (int rank = 0; rank < members_.size; ++rank) {
    Peer& peer = peers_[rank];
    if (!peer.parted || finished_ < peer.counts) continue;
    peer.parted = false;
    peers.push_back(rank);
  }
  return peers;
}

void Farewell::TellFinished(const std::vector<int>& peers) {
  for (const int peer : peers) {
    control_->Send(peer, PackSignal(FrameType::kByeHeard)).IgnoreError();
  }
}

void Farewell::OnByeHeard(int from) {
  const absl::MutexLock lock(&mu_);
  peers_[from].needs_nothing = true;
}

void Farewell::OnPong(int from) {
  const absl::MutexLock lock(&mu_);
  roll_.OnAnswer(from);
}

bool Farewell::IsUnneeded() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.needs_nothing; });
}

bool Farewell::AwaitUnneeded(absl::Duration patience) {
  const absl::MutexLock lock(&mu_);
  return mu_.AwaitWithTimeout(absl::Condition(this, &Farewell::IsUnneeded), patience);
}

// Asks the peers that may need this rank whether they are there. True if none of them is.
bool Farewell::AsksInVain() {
  std::vector<int> asked;
  bool in_vain = true;
  {
    const double now = Seconds(Clock::now().time_since_epoch());
    const absl::MutexLock lock(&mu_);
    for (int rank = 0; rank < members_.size; ++rank) {
      if (peers_[rank].needs_nothing) continue;
      if (roll_.Ask(rank, now)) asked.push_back(rank);
      in_vain = in_vain && roll_.IsSilent(rank, now);
    }
  }
  for (const int peer : asked) control_->Send(peer, PackSignal(FrameType::kPing)).IgnoreError();
  return in_vain;
}

void Farewell::OnBye(int from, uint64_t started) {
  absl::Status reason;
  std::vector<int> peers;
  {
    const absl::MutexLock lock(&mu_);
    peers_[from] = {.parted = true, .counts = started, .needs_nothing = true};
    if (++byes_ == 1 || started < counted_) {
      first_ = from;
      counted_ = started;
    }
    if (IsCut()) {
      reason = Reason();
    } else {
      peers = TakeFinishedFor();
    }
  }
  if (!reason.ok()) return failure_.Fail(reason, Tell::kEveryone);
  TellFinished(peers);
}

void Farewell::OnControlLost(const absl::Status& reason) {
  absl::Status known = reason;
  bool parted;
  {
    const absl::MutexLock lock(&mu_);
    // A peer that has said goodbye may leave once all is done here. That fails what comes later,
    // and is no news to the others, who have heard its goodbye as well. While something is under
    // way it is another peer that is lost.
    const bool has_left = byes_ > 0 && finished_ == started_;
    parted = said_ || has_left;
    if (has_left) known = Reason();
  }
  failure_.OnControlLost(known, parted ? Tell::kNobody : Tell::kEveryone);
}

void Farewell::Say() {
  uint64_t started;
  {
    const absl::MutexLock lock(&mu_);
    said_ = true;
    started = started_;
  }
  failure_.SendToAll(PackBye(started));
  const Deadline patience = Clock::now() + timeout_;
  // In turns, since a group that fails meanwhile says no more.
  while (!AwaitUnneeded(kTurn)) {
    if (failure_.failed() || Clock::now() >= patience || AsksInVain()) return;
  }
}

}  // namespace thinwire
