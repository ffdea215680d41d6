#include "schedule/store_host/resender.h"

#include <algorithm>
#include <utility>

namespace thinwire {

using Kind = StoreHead::Kind;

// Returns the same for a message and for its answer.
Resender::Answer Resender::AnswerOf(const StoreHead& head) {
  switch (head.kind) {
    case Kind::kPush:
    case Kind::kIdle:
    case Kind::kLeave:
    case Kind::kStored: return {Kind::kStored, head.slice, head.number};
    case Kind::kPull:
    case Kind::kPushPull:
    case Kind::kValues: return {Kind::kValues, 0, head.request};
    case Kind::kEnter:
    case Kind::kWelcome: return {Kind::kWelcome, 0, 0};
    case Kind::kTake:
    case Kind::kWork: return {Kind::kWork, 0, head.request};
    case Kind::kGet:
    case Kind::kState: return {Kind::kState, 0, head.request};
    case Kind::kTogether:
    case Kind::kDone: return {Kind::kDone, head.slice, head.number};
    case Kind::kPut:  // answered with the collective that follows
    case Kind::kError: return {head.kind, 0, 0};
  }
  return {head.kind, 0, 0};
}

absl::Status Resender::Send(int priority, const StoreHead& head, std::vector<uint8_t> body) {
  const absl::MutexLock lock(&mu_);
  if (!has_journal_) return SendByPlane(priority, head, std::move(body));
  unanswered_.insert({AnswerOf(head), {sent_++, priority, head, body}});
  if (lost_since_.has_value()) return absl::OkStatus();
  const absl::Status sent = SendByPlane(priority, head, std::move(body));
  // The loss will arrive as an event.
  return absl::IsUnavailable(sent) ? absl::OkStatus() : sent;
}

void Resender::OnAnswer(const StoreHead& answer) {
  const absl::MutexLock lock(&mu_);
  if (answer.kind == Kind::kWelcome) has_journal_ = answer.have != 0;
  if (answer.kind == Kind::kDone) {
    has_journal_ = answer.have != 0;
    unanswered_.erase(AnswerOf(answer));
    unanswered_.erase({Kind::kPut, 0, 0});
    return;
  }
  const auto oldest = unanswered_.lower_bound(AnswerOf(answer));
  if (oldest != unanswered_.end() && oldest->first == AnswerOf(answer)) unanswered_.erase(oldest);
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
  // Errors of Send are ignored: another loss will arrive as an event.
  std::vector<const Sent*> again;
  for (const auto& [_, sent] : unanswered_) again.push_back(&sent);
  std::sort(again.begin(), again.end(),
            [](const Sent* a, const Sent* b) { return a->order < b->order; });
  for (const Sent* sent : again) {
    SendByPlane(sent->priority, sent->head, sent->body).IgnoreError();
  }
}

absl::Status Resender::LostBefore(Deadline since) const {
  const absl::MutexLock lock(&mu_);
  return lost_since_.has_value() && *lost_since_ < since ? loss_ : absl::OkStatus();
}

bool Resender::has_journal() const {
  const absl::MutexLock lock(&mu_);
  return has_journal_;
}

bool Resender::is_empty() const {
  const absl::MutexLock lock(&mu_);
  return unanswered_.empty();
}

}  // namespace thinwire
