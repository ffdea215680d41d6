// StoreWorker's receiver thread: handles servers that come and go, and their messages.
#include <chrono>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "schedule/store_host/worker.h"

namespace thinwire {
namespace {

using Kind = StoreHead::Kind;

constexpr std::chrono::milliseconds kTick{100};

}  // namespace

void StoreWorker::Receive() {
  while (true) {
    absl::StatusOr<MessageEvent> event = plane_->Receive(Clock::now() + kTick);
    CheckLost();
    if (!event.ok()) {
      if (absl::IsDeadlineExceeded(event.status())) continue;
      return;  // closed
    }
    if (const auto* message = std::get_if<Message>(&*event)) {
      OnMessage(*message);
    } else {
      OnPeer(std::get<PeerEvent>(*event));
    }
  }
}

void StoreWorker::OnPeer(const PeerEvent& event) {
  const int server = event.peer - options_.workers;
  Resender& resender = *resenders_[static_cast<size_t>(server)];
  {
    const absl::MutexLock lock(&mu_);
    if (is_closing_) return;
    // While this worker leaves, a server that has answered everything may close.
    if (is_leaving_ && resender.is_empty()) return changed_.SignalAll();
    if (event.kind == PeerEvent::Kind::kJoined) connected_.insert(server);
    changed_.SignalAll();
  }
  if (event.kind == PeerEvent::Kind::kJoined) return resender.OnJoined();
  if (resender.OnLost(event.reason, Clock::now())) return;
  Fail(absl::UnavailableError(
      absl::StrCat("worker ", rank_, " lost server ", server,
                   " and the values that it holds: ", event.reason.message())));
}

void StoreWorker::CheckLost() {
  for (size_t server = 0; server < resenders_.size(); ++server) {
    const absl::Status loss = resenders_[server]->LostBefore(Clock::now() - options_.timeout);
    if (loss.ok()) continue;
    Fail(absl::UnavailableError(
        absl::StrCat("worker ", rank_, " lost server ", server, ", which did not come back within ",
                     std::chrono::duration<double>(options_.timeout).count(),
                     " s; start it again with its ", "rank and journal: ", loss.message())));
  }
}

void StoreWorker::OnMessage(const Message& message) {
  const int server = message.peer - options_.workers;
  const absl::StatusOr<StoreHead> head = StoreHead::Parse(message.head);
  if (!head.ok()) {
    return Fail(absl::Status(
        head.status().code(),
        absl::StrCat("worker ", rank_, ", server ", server, ": ", head.status().message())));
  }
  resenders_[static_cast<size_t>(server)]->OnAnswer(*head);
  switch (head->kind) {
    case Kind::kValues: return OnValues(server, *head, message.body);
    case Kind::kStored: {
      const absl::MutexLock lock(&mu_);
      return changed_.SignalAll();
    }
    case Kind::kDone: {
      const absl::MutexLock lock(&mu_);
      done_[{head->slice, head->number}].insert(server);
      if (!message.body.empty()) refusal_.assign(message.body.begin(), message.body.end());
      return changed_.SignalAll();
    }
    case Kind::kWelcome: {
      const absl::MutexLock lock(&mu_);
      welcomes_[server] = message;
      return changed_.SignalAll();
    }
    case Kind::kWork: {
      const absl::MutexLock lock(&mu_);
      if (head->request == work_request_) {
        work_ = {*head, std::string(message.body.begin(), message.body.end())};
      }
      return changed_.SignalAll();
    }
    case Kind::kState: {
      const absl::MutexLock lock(&mu_);
      states_[head->request] = message.body;
      return changed_.SignalAll();
    }
    case Kind::kError:
      return Fail(
          absl::Status(head->number == 0 ? absl::StatusCode::kInternal
                                         : static_cast<absl::StatusCode>(head->number),
                       absl::StrCat("worker ", rank_, ": ",
                                    std::string(message.body.begin(), message.body.end()))));
    default:
      return Fail(absl::InvalidArgumentError(absl::StrCat("worker ", rank_, ": server ", server,
                                                          " sent a message of kind ",
                                                          static_cast<int>(head->kind))));
  }
}

void StoreWorker::OnValues(int server, const StoreHead& head, Bytes body) {
  Pulled pulled;
  CodecSpec down;
  DeltaReader* reader = nullptr;
  {
    const absl::MutexLock lock(&mu_);
    const auto found = pulled_.find(head.request);
    // After a failure the memory belongs to the caller again.
    if (!failure_.ok() || found == pulled_.end() || found->second.slice != head.slice) return;
    pulled = found->second;
    Key& key = keys_[pulled.key];
    if (pulled.rows == nullptr && pulled.out.data == nullptr) {
      key.applied = std::min(key.applied, head.number);
      --key.pulls;
      pulled_.erase(found);
      return changed_.SignalAll();
    }
    key.is_written = true;
    down = layout_.keys()[pulled.key].codec.down;
    reader = readers_[pulled.slice].get();
  }
  absl::Status taken = pulled.rows != nullptr
                           ? TakeRows(pulled, down, head.form, body)
                           : reader->Take(head.form, head.number, head.have, body, pulled.out);
  std::string key;
  {
    const absl::MutexLock lock(&mu_);
    keys_[pulled.key].is_written = false;
    if (taken.ok()) {
      pulled_.erase(head.request);
      --keys_[pulled.key].pulls;
    } else {
      key = layout_.keys()[pulled.key].name;
    }
    changed_.SignalAll();
  }
  if (taken.ok()) return;
  Fail(absl::Status(taken.code(), absl::StrCat("worker ", rank_, ", server ", server, ", key '",
                                               key, "': ", taken.message())));
}

}  // namespace thinwire
