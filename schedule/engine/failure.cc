#include "schedule/engine/failure.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

const absl::Duration kBetterReason = absl::Milliseconds(250);  // to overtake a closed socket
// A peer that has stopped never echoes, and takes no last words. Those that the roll call finds
// silent are not waited for; waiting for another must not add much to the timeout that it has cost
// already.
const absl::Duration kEchoes = absl::Milliseconds(250);  // at most, and a 20th of the timeout
constexpr std::chrono::milliseconds kLastWords(200);     // at most, and a 50th of the timeout

}  // namespace

absl::Status OfTensor(const std::string& tensor, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat("tensor '", tensor, "': ", std::string(status.message())));
}

FailureProtocol::FailureProtocol(const Membership& members, const Options& options,
                                 Transport& transport, const Standstill& standstill,
                                 Records& records)
    : members_(members),
      transport_(transport),
      standstill_(standstill),
      records_(records),
      flight_path_(options.flight_path),
      echo_patience_(std::min(kEchoes, absl::FromChrono(options.timeout / 20))),
      last_words_(std::min(kLastWords, options.timeout / 50)) {}

absl::Status FailureProtocol::Explain(const std::string& tensor, const absl::Status& status) const {
  const std::string named = absl::StrCat("tensor '", tensor, "'");
  // The reason may name the tensor itself, and says it better then: with the rank that it is about.
  const std::string place =
      absl::StrContains(status.message(), named) ? "" : absl::StrCat(", ", named);
  return absl::Status(status.code(),
                      absl::StrCat("rank ", members_.rank, place, ": ", status.message()));
}

void FailureProtocol::Fail(absl::Status reason, Tell tell, int silent) {
  if (tell == Tell::kNobody) OnEchoes(peers());
  reason = standstill_.Explain(members_.rank, reason, Clock::now());
  {
    const absl::MutexLock lock(&mu_);
    if (!status_.ok()) return;
    status_ = reason;
    silent_ = silent;
    told_ = peers() == 0;
    failed_.store(true, std::memory_order_release);
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
  Fail(OfTensor(tensor, status), Tell::kEveryone);
}

void FailureProtocol::OnPeerFailed(absl::Status reason, int silent) {
  Fail(std::move(reason), Tell::kEveryone, silent);
  OnEchoes(1);
}

void FailureProtocol::OnControlLost(const absl::Status& reason, Tell tell) {
  Fail(reason, tell);
  OnEchoes(peers());
}

void FailureProtocol::OnEchoes(int echoes) {
  const absl::MutexLock lock(&mu_);
  echoes_ += echoes;
}

absl::Status FailureProtocol::status() const {
  const absl::MutexLock lock(&mu_);
  return status_;
}

bool FailureProtocol::AwaitFailure(absl::Duration patience) const {
  const absl::MutexLock lock(&mu_);
  return mu_.AwaitWithTimeout(absl::Condition(this, &FailureProtocol::HasFailed), patience);
}

void FailureProtocol::CarryThrough() {
  absl::Status reason;
  {
    const absl::MutexLock lock(&mu_);
    mu_.AwaitWithTimeout(absl::Condition(this, &FailureProtocol::IsEchoed), echo_patience_);
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

}  // namespace thinwire
