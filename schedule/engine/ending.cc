#include "schedule/engine/ending.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace thinwire {
namespace {

// How long a better reason may take to arrive after a closed connection.
constexpr std::chrono::milliseconds kBetterReason(250);
// A stopped peer never echoes, and never reads what is sent to it. Peers that the roll call finds
// silent are not waited for; waiting for any other stopped peer must not add much to the timeout
// that it has cost already.
constexpr std::chrono::milliseconds kEchoes(250);     // at most, and a 20th of the timeout
constexpr std::chrono::milliseconds kLastWords(200);  // at most, and a 50th of the timeout

using Tell = FailureProtocol::Tell;

constexpr double kPause_s = 0.1;  // between two pings of a peer
constexpr std::chrono::milliseconds kTurn(20);

bool NamesARank(const absl::Status& status) { return absl::StartsWith(status.message(), "rank "); }

double Seconds(std::chrono::nanoseconds duration) { return 1e-9 * duration.count(); }

}  // namespace

absl::Status OfTensor(int rank, const std::string& tensor, const absl::Status& status) {
  const std::string of_rank = NamesARank(status) ? "" : absl::StrCat("rank ", rank, ", ");
  return absl::Status(status.code(),
                      absl::StrCat(of_rank, "tensor '", tensor, "': ", status.message()));
}

FailureProtocol::FailureProtocol(const Membership& members, const Options& options,
                                 Transport& transport, Records& records)
    : members_(members),
      transport_(transport),
      records_(records),
      flight_path_(options.flight_path),
      timeout_(options.timeout),
      standstill_(std::max(options.timeout / 4, std::chrono::milliseconds(500))),
      echo_patience_(std::min(kEchoes, options.timeout / 20)),
      last_words_(std::min(kLastWords, options.timeout / 50)) {}

void FailureProtocol::Beat(Deadline now) {
  const absl::MutexLock lock(&mu_);
  if (last_beat_.has_value() && now - *last_beat_ >= standstill_) {
    woke_ = now;
    stood_ = now - *last_beat_;
  }
  last_beat_ = now;
}

std::chrono::duration<double> FailureProtocol::StoodStill(Deadline now) const {
  const absl::MutexLock lock(&mu_);
  // Another thread may wake up before the one that calls Beat.
  if (last_beat_.has_value() && now - *last_beat_ >= standstill_) return now - *last_beat_;
  if (woke_.has_value() && now - *woke_ < timeout_) return stood_;
  return {};
}

absl::Status FailureProtocol::WithStandstill(const absl::Status& reason, Deadline now) const {
  const bool gone = absl::IsUnavailable(reason);
  if (!gone && !absl::IsDeadlineExceeded(reason)) return reason;
  const std::chrono::duration<double> stood = StoodStill(now);
  if (stood.count() == 0) return reason;
  const std::string consequence =
      gone ? "its peers have given it up; let it run, or raise the timeout"
           : absl::StrCat("so ", std::string(reason.message()));
  return absl::DeadlineExceededError(absl::StrCat(
      "rank ", members_.rank, " itself was stopped for ", absl::StrFormat("%.1f", stood.count()),
      " s, by a signal, by a debugger or for want of a processor, and ", consequence));
}

absl::Status FailureProtocol::Explain(const std::string& tensor, const absl::Status& status) const {
  const std::string named = absl::StrCat("tensor '", tensor, "'");
  const std::string whole = absl::StrCat("rank ", members_.rank, ", ", named);
  if (absl::StartsWith(status.message(), whole)) return status;
  // If the reason names the tensor itself, it does so better: with the rank that it is about.
  const std::string place =
      absl::StrContains(status.message(), named) ? "" : absl::StrCat(", ", named);
  return absl::Status(status.code(),
                      absl::StrCat("rank ", members_.rank, place, ": ", status.message()));
}

void FailureProtocol::Fail(absl::Status reason, Tell tell, int silent) {
  if (tell == Tell::kNobody) OnEchoes(peers());
  reason = WithStandstill(reason, Clock::now());
  {
    const absl::MutexLock lock(&mu_);
    if (!status_.ok()) return;
    status_ = reason;
    silent_ = silent;
    told_ = peers() == 0;
    failed_.store(true, std::memory_order_release);
    changed_.SignalAll();
  }
  const std::string_view text(reason.message().data(), reason.message().size());
  records_.Event(FlightEvent::kFailed, text);
  if (tell == Tell::kNobody) return;
  SendToAll(PackFailure(reason, silent));
  WriteFlight();
}

void FailureProtocol::SendToAll(const ControlFrame& frame) {
  if (peers() > 0) transport_.control->SendToAll(frame);
}

void FailureProtocol::WriteFlight() const {
  if (flight_path_.empty()) return;
  std::ofstream out(PathOfRank(flight_path_, members_.rank));
  out << "rank " << members_.rank << " of " << members_.size << " failed: " << status() << "\n"
      << records_.LastEvents();
}

void FailureProtocol::FailFromExchange(const absl::Status& status, const std::string& tensor) {
  if (absl::IsUnavailable(status)) AwaitFailure(kBetterReason);
  Fail(OfTensor(members_.rank, tensor, status), Tell::kEveryone);
}

void FailureProtocol::OnPeerFailed(absl::Status reason, int silent) {
  Fail(std::move(reason), Tell::kEveryone, silent);
  OnEchoes(1);
}

void FailureProtocol::OnControlLost(const absl::Status& reason, Tell tell) {
  // This rank's control plane may have failed because of its device; then the reason names no rank.
  const std::string of_rank = NamesARank(reason) ? "" : absl::StrCat("rank ", members_.rank, ": ");
  Fail(absl::Status(reason.code(), absl::StrCat(of_rank, reason.message())), tell);
  OnEchoes(peers());
}

void FailureProtocol::OnEchoes(int echoes) {
  const absl::MutexLock lock(&mu_);
  echoes_ += echoes;
  changed_.SignalAll();
}

absl::Status FailureProtocol::status() const {
  const absl::MutexLock lock(&mu_);
  return status_;
}

bool FailureProtocol::AwaitFailure(std::chrono::milliseconds patience) const {
  const Deadline deadline = Clock::now() + patience;
  const absl::MutexLock lock(&mu_);
  while (status_.ok() && Clock::now() < deadline) changed_.WaitUntil(&mu_, deadline);
  return !status_.ok();
}

void FailureProtocol::CarryThrough() {
  absl::Status reason;
  {
    const Deadline deadline = Clock::now() + echo_patience_;
    const absl::MutexLock lock(&mu_);
    while (!IsEchoed() && Clock::now() < deadline) changed_.WaitUntil(&mu_, deadline);
    reason = status_;
  }
  transport_.control->Abort(reason);
  transport_.data->Abort(std::move(reason));
  transport_.control->Flush(Clock::now() + last_words_);
  const absl::MutexLock lock(&mu_);
  told_ = true;
}

void FailureProtocol::AwaitTold() const {
  const absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(this, &FailureProtocol::MayTell));
}

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

// Takes the peers that have said goodbye and to which kByeHeard is now due.
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
  changed_.SignalAll();
}

void Farewell::OnPong(int from) {
  const double now = Seconds(Clock::now().time_since_epoch());
  const absl::MutexLock lock(&mu_);
  roll_.OnAnswer(from, now);
}

bool Farewell::IsUnneeded() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.needs_nothing; });
}

bool Farewell::AwaitUnneeded(std::chrono::milliseconds patience) {
  const Deadline deadline = Clock::now() + patience;
  const absl::MutexLock lock(&mu_);
  while (!IsUnneeded() && Clock::now() < deadline) changed_.WaitUntil(&mu_, deadline);
  return IsUnneeded();
}

// Pings the peers that may need this rank. True if none of them answers.
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
    changed_.SignalAll();
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
    // A peer that has said goodbye may leave once all collectives are done here. Later collectives
    // then fail, but the other ranks, which got its goodbye too, need not be told. While a
    // collective is under way, the lost peer is another one.
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
  // In short turns, to notice a group that fails meanwhile.
  while (!AwaitUnneeded(kTurn)) {
    if (failure_.failed() || Clock::now() >= patience || AsksInVain()) return;
  }
}

}  // namespace thinwire
