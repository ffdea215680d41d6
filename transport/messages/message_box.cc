#include "transport/messages/message_box.h"

#include "absl/strings/str_cat.h"
#include "transport/store.h"

namespace thinwire {

absl::Status MessageBox::Send(int peer, CreditQueue::Outgoing message) {
  const size_t bytes = message.head.size() + message.body.size();
  if (bytes > limits_.max_message) {
    return absl::InvalidArgumentError(absl::StrCat("a message of ", bytes, " bytes from rank ",
                                                   rank_, " to rank ", peer, ": at most ",
                                                   limits_.max_message, " may be sent"));
  }
  bool wake = false;
  {
    const absl::MutexLock lock(&mu_);
    if (closing_) return Closed();
    const auto link = links_.find(peer);
    if (link == links_.end() || inbox_.HasEventOf(peer)) {
      return absl::UnavailableError(
          absl::StrCat("rank ", rank_, " is not connected to rank ", peer));
    }
    link->second.queue.Push(std::move(message));
    wake = NeedsWaking();
  }
  if (wake) wake_();
  return absl::OkStatus();
}

absl::StatusOr<MessageEvent> MessageBox::Receive(Deadline deadline) {
  std::optional<MessageEvent> event;
  bool wake = false;
  {
    const absl::MutexLock lock(&mu_);
    while (!closed_ && inbox_.empty()) {
      if (Clock::now() >= deadline) return NothingCame();
      changed_.WaitUntil(&mu_, deadline);
    }
    if (closed_) return Closed();
    event = inbox_.Take();
    if (const auto* message = std::get_if<Message>(&*event)) {
      Link& link = links_.at(message->peer);  // Lose has dropped those of lost peers
      link.taken += CostOf(message->head, message->body);
      --link.waiting;
      wake = link.TellsTaken(limits_.credit) && NeedsWaking();
    }
  }
  if (wake) wake_();
  return *std::move(event);
}

uint64_t MessageBox::bytes_sent() const {
  const absl::MutexLock lock(&mu_);
  return bytes_sent_;
}

std::optional<absl::Status> MessageBox::Close(Deadline deadline) {
  const absl::MutexLock lock(&mu_);
  if (std::exchange(closing_, true)) return std::nullopt;
  while (!Idle() && Clock::now() < deadline) changed_.WaitUntil(&mu_, deadline);
  closed_ = true;
  changed_.SignalAll();
  std::vector<int> behind;
  for (const auto& [peer, link] : links_) {
    if (!link.queue.idle()) behind.push_back(peer);
  }
  return LeftBehind(rank_, behind);
}

void MessageBox::Join(int peer) {
  const absl::MutexLock lock(&mu_);
  links_.emplace(peer, Link{.queue = CreditQueue(limits_.credit)});
  missing_.erase(peer);
  inbox_.Join(peer);
  changed_.SignalAll();
}

void MessageBox::Lose(int peer, absl::Status reason) {
  const absl::MutexLock lock(&mu_);
  links_.erase(peer);
  inbox_.Lose(peer, std::move(reason));
  changed_.SignalAll();
}

void MessageBox::Add(Message message) {
  const absl::MutexLock lock(&mu_);
  ++links_.at(message.peer).waiting;
  inbox_.Add(std::move(message));
  changed_.SignalAll();
}

bool MessageBox::Acknowledge(int peer, uint64_t taken) {
  const absl::MutexLock lock(&mu_);
  const auto link = links_.find(peer);
  if (link == links_.end()) return true;
  if (closing_) changed_.SignalAll();
  return link->second.queue.Acknowledge(taken, Clock::now());
}

uint64_t MessageBox::TakenFrom(int peer) const {
  const absl::MutexLock lock(&mu_);
  const auto link = links_.find(peer);
  return link == links_.end() ? 0 : link->second.taken;
}

void MessageBox::SetMissing(int peer, std::string why) {
  const absl::MutexLock lock(&mu_);
  missing_[peer] = std::move(why);
}

std::vector<MessageBox::Departure> MessageBox::Collect() {
  std::vector<Departure> departures;
  const Deadline now = Clock::now();
  const absl::MutexLock lock(&mu_);
  woken_ = false;
  for (auto& [peer, link] : links_) {
    Departure departure{.peer = peer, .taken = {}, .messages = {}};
    if (link.TellsTaken(limits_.credit)) departure.taken = link.told = link.taken;
    while (std::optional<CreditQueue::Outgoing> message = link.queue.Pop(now)) {
      bytes_sent_ += message->head.size() + message->body.size();
      departure.messages.push_back(*std::move(message));
    }
    if (departure.taken.has_value() || !departure.messages.empty()) {
      departures.push_back(std::move(departure));
    }
  }
  return departures;
}

bool MessageBox::Idle() const {
  for (const auto& [peer, link] : links_) {
    if (!link.queue.idle()) return false;
  }
  return true;
}

absl::Status MessageBox::NothingCame() const {
  std::string missing;
  for (const auto& [peer, why] : missing_) {
    absl::StrAppend(&missing, "; rank ", peer, " is not connected: ", why);
  }
  return absl::DeadlineExceededError(
      absl::StrCat("no message came to rank ", rank_, " in time", missing));
}

absl::Status MessageBox::Closed() const {
  return absl::CancelledError(absl::StrCat("the plane of rank ", rank_, " is closed"));
}

}  // namespace thinwire
