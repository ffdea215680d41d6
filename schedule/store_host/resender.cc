#include "schedule/store_host/resender.h"

#include <algorithm>
#include <utility>

namespace thinwire {
namespace {

using Kind = StoreHead::Kind;

bool Answers(const StoreHead& answer, const StoreHead& sent) {
  switch (answer.kind) {
    case Kind::kStored:
      return (sent.kind == Kind::kPush || sent.kind == Kind::kIdle) && sent.slice == answer.slice &&
             sent.number == answer.number;
    case Kind::kValues:
      return (sent.kind == Kind::kPull || sent.kind == Kind::kPushPull) &&
             sent.request == answer.request;
    case Kind::kWelcome: return sent.kind == Kind::kEnter;
    case Kind::kWork: return sent.kind == Kind::kTake && sent.request == answer.request;
    case Kind::kState: return sent.kind == Kind::kGet && sent.request == answer.request;
    case Kind::kDone:
      // Values and states go with the call that follows them.
      return sent.kind == Kind::kPut ||
             (sent.kind == Kind::kTogether && sent.slice == answer.slice &&
              sent.number == answer.number);
    default: return false;
  }
}

}  // namespace

absl::Status Resender::Send(int priority, const StoreHead& head, std::vector<uint8_t> body) {
  const absl::MutexLock lock(&mu_);
  if (!has_journal_) return SendByPlane(priority, head, std::move(body));
  unanswered_.push_back({priority, head, body});
  if (lost_since_.has_value()) return absl::OkStatus();
  const absl::Status sent = SendByPlane(priority, head, std::move(body));
  // The loss comes as an event.
  return absl::IsUnavailable(sent) ? absl::OkStatus() : sent;
}

void Resender::OnAnswer(const StoreHead& answer) {
  const absl::MutexLock lock(&mu_);
  if (answer.kind == Kind::kWelcome) has_journal_ = answer.have != 0;
  const auto is_answered = [&](const Sent& sent) { return Answers(answer, sent.head); };
  if (answer.kind == Kind::kDone) {
    has_journal_ = answer.have != 0;
    std::erase_if(unanswered_, is_answered);
    return;
  }
  // Answers come about in the order of what they answer, so it is near the front.
  const auto found = std::find_if(unanswered_.begin(), unanswered_.end(), is_answered);
  if (found != unanswered_.end()) unanswered_.erase(found);
}

bool Resender::OnLost(const absl::Status& reason, Deadline now) {
  const absl::MutexLock lock(&mu_);
  if (!has_journal_ || !(absl::IsUnavailable(reason) || absl::IsDeadlineExceeded(reason))) {
    return false;
  }
  if (!lost_since_.has_value()) lost_since_ = now;
  loss_ = reason;
  return true;
}

void Resender::OnJoined() {
  const absl::MutexLock lock(&mu_);
  if (!std::exchange(lost_since_, std::nullopt).has_value()) return;
  // If it is lost again meanwhile, that comes as an event.
  for (const Sent& sent : unanswered_) {
    SendByPlane(sent.priority, sent.head, sent.body).IgnoreError();
  }
}

absl::Status Resender::LostBefore(Deadline since) const {
  const absl::MutexLock lock(&mu_);
  return lost_since_.has_value() && *lost_since_ < since ? loss_ : absl::OkStatus();
}

bool Resender::is_empty() const {
  const absl::MutexLock lock(&mu_);
  return unanswered_.empty();
}

}  // namespace thinwire
