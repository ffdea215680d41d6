#include "schedule/engine/failure.h"

#include <chrono>
#include <fstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "schedule/engine/trace.h"

namespace thinwire {
namespace {

const absl::Duration kBetterReason = absl::Milliseconds(250);  // to overtake a closed socket
const absl::Duration kEchoes = absl::Milliseconds(250);  // for every peer to say that it has failed
const absl::Duration kByes = absl::Seconds(2);           // a rank that stays must not keep us
constexpr std::chrono::milliseconds kLastWords(200);     // for the own reason to leave

}  // namespace

absl::Status FailureProtocol::Explain(const std::string& tensor, const absl::Status& status) const {
  const std::string named = absl::StrCat("tensor '", tensor, "'");
  // The reason may name the tensor itself, and says it better then: with the rank that it is about.
  const std::string place =
      absl::StrContains(status.message(), named) ? "" : absl::StrCat(", ", named);
  return absl::Status(status.code(),
                      absl::StrCat("rank ", members_.rank, place, ": ", status.message()));
}

void FailureProtocol::Fail(absl::Status reason, Tell tell) {
  if (tell == Tell::kNobody) OnEchoes(peers());
  {
    const absl::MutexLock lock(&mu_);
    if (!status_.ok()) return;
    status_ = reason;
    told_ = peers() == 0;
    failed_.store(true, std::memory_order_release);
  }
  const std::string_view text(reason.message().data(), reason.message().size());
  recorder_.Record(FlightEvent::kFailed, text);
  if (tell == Tell::kNobody) return;
  SendToAll(PackFailure(reason));
  WriteFlight();
}

void FailureProtocol::SendToAll(const ControlFrame& frame) {
  for (int peer = 0; peer < members_.size; ++peer) {
    if (peer != members_.rank) transport_.control->Send(peer, frame).IgnoreError();
  }
}

void FailureProtocol::WriteFlight() const {
  if (flight_path_.empty()) return;
  std::ofstream out(PathOfRank(flight_path_, members_.rank));
  out << "rank " << members_.rank << " of " << members_.size << " failed: " << status() << "\n"
      << recorder_.Text();
}

void FailureProtocol::FailFromExchange(const absl::Status& status, const std::string& tensor) {
  if (absl::IsUnavailable(status)) AwaitFailure(kBetterReason);
  Fail(absl::Status(status.code(),
                    absl::StrCat("tensor '", tensor, "': ", std::string(status.message()))),
       Tell::kEveryone);
}

void FailureProtocol::OnPeerFailed(absl::Status reason) {
  Fail(std::move(reason), Tell::kEveryone);
  OnEchoes(1);
}

void FailureProtocol::OnControlLost(const absl::Status& reason) {
  bool parted;
  {
    const absl::MutexLock lock(&mu_);
    parted = said_bye_;
  }
  // A peer that has heard everybody's goodbye leaves, maybe before this rank has heard them all;
  // after the own goodbye that is no failure.
  Fail(reason, parted ? Tell::kNobody : Tell::kEveryone);
  OnEchoes(peers());
}

void FailureProtocol::OnEchoes(int echoes) {
  const absl::MutexLock lock(&mu_);
  echoes_ += echoes;
}

void FailureProtocol::OnBye() {
  const absl::MutexLock lock(&mu_);
  ++byes_;
}

// A rank may have all that it wants while its peers still exchange their last chunk, and a closed
// connection would look like a lost peer to them. So all close together.
void FailureProtocol::SayBye() {
  {
    const absl::MutexLock lock(&mu_);
    said_bye_ = true;
  }
  SendToAll(PackSignal(FrameType::kBye));
  const absl::MutexLock lock(&mu_);
  mu_.AwaitWithTimeout(absl::Condition(this, &FailureProtocol::IsOver), kByes);
}

absl::Status FailureProtocol::status() const {
  const absl::MutexLock lock(&mu_);
  return status_;
}

bool FailureProtocol::AwaitFailure(absl::Duration patience) const {
  const absl::MutexLock lock(&mu_);
  return mu_.AwaitWithTimeout(absl::Condition(this, &FailureProtocol::HasFailed), patience);
}

void FailureProtocol::Spread() {
  absl::Status reason;
  {
    const absl::MutexLock lock(&mu_);
    mu_.AwaitWithTimeout(absl::Condition(this, &FailureProtocol::IsEchoed), kEchoes);
    reason = status_;
  }
  transport_.control->Abort(reason);
  transport_.data->Abort(std::move(reason));
  transport_.control->Flush(Clock::now() + kLastWords);
  const absl::MutexLock lock(&mu_);
  told_ = true;
}

void FailureProtocol::AwaitTold() const {
  const absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(this, &FailureProtocol::MayTell));
}

}  // namespace thinwire
