#include "transport/messages/in_process.h"

#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "transport/messages/queues.h"
#include "transport/steady_cond_var.h"
#include "transport/store.h"

namespace thinwire {

// All state of all members. Each member has an id of its own, since a rank may come again.
class MessageHub {
 public:
  explicit MessageHub(const MessageLimits& limits) : limits_(limits) {}

  uint64_t Join(int rank, std::vector<int> calls) {
    const absl::MutexLock lock(&mu_);
    if (const auto old = ranks_.find(rank); old != ranks_.end()) {
      const absl::Status replaced =
          absl::FailedPreconditionError(absl::StrCat("another member has come as rank ", rank));
      Member& member = members_[old->second];
      for (const auto& [peer, link] : member.links) member.inbox.Lose(peer, replaced);
      Leave(member, absl::UnavailableError(absl::StrCat("rank ", rank, " has connected anew")));
    }
    const uint64_t id = next_id_++;
    Member& member = members_[id];
    member.rank = rank;
    member.calls = {calls.begin(), calls.end()};
    for (const auto& [peer, peer_id] : ranks_) {
      if (member.calls.contains(peer) || members_[peer_id].calls.contains(rank)) {
        Connect(id, peer_id);
        Connect(peer_id, id);
      }
    }
    ranks_[rank] = id;
    return id;
  }

  absl::Status Send(uint64_t id, int peer, CreditQueue::Outgoing message) {
    const absl::MutexLock lock(&mu_);
    Member& member = members_[id];
    if (member.closing || member.closed) return Closed(member);
    if (message.head.size() + message.body.size() > limits_.max_message) {
      return absl::InvalidArgumentError(
          absl::StrCat("a message of ", message.head.size() + message.body.size(),
                       " bytes to rank ", peer, ": at most ", limits_.max_message, " may be sent"));
    }
    const auto link = member.links.find(peer);
    if (link == member.links.end() || member.inbox.HasEventOf(peer)) {
      return absl::UnavailableError(
          absl::StrCat("rank ", member.rank, " is not connected to rank ", peer));
    }
    link->second.queue.Push(std::move(message));
    Move(member, link->second);
    return absl::OkStatus();
  }

  absl::StatusOr<MessageEvent> Receive(uint64_t id, Deadline deadline) {
    const absl::MutexLock lock(&mu_);
    Member& member = members_[id];
    while (!member.closed && member.inbox.empty()) {
      if (Clock::now() >= deadline) return NothingCame(member);
      member.changed.WaitUntil(&mu_, deadline);
    }
    if (member.closed) return Closed(member);
    MessageEvent event = member.inbox.Take();
    if (const auto* message = std::get_if<Message>(&event)) {
      Link& link = member.links.at(message->peer);
      link.taken += CostOf(message->head, message->body);
      Member& sender = members_[link.peer_id];
      Link& back = sender.links.at(member.rank);
      back.queue.Acknowledge(link.taken, Clock::now());
      Move(sender, back);
      sender.changed.SignalAll();  // Close may wait for it
    }
    return event;
  }

  uint64_t BytesSent(uint64_t id) const {
    const absl::MutexLock lock(&mu_);
    return members_.at(id).bytes_sent;
  }

  absl::Status Close(uint64_t id, Deadline deadline) {
    const absl::MutexLock lock(&mu_);
    Member& member = members_[id];
    if (std::exchange(member.closing, true)) return absl::OkStatus();
    while (!member.closed && !Idle(member) && Clock::now() < deadline) {
      member.changed.WaitUntil(&mu_, deadline);
    }
    if (member.closed) return absl::OkStatus();
    std::vector<int> behind;
    for (const auto& [peer, link] : member.links) {
      if (!link.queue.idle()) behind.push_back(peer);
    }
    member.closed = true;
    member.changed.SignalAll();
    Leave(member, absl::CancelledError(absl::StrCat("rank ", member.rank, " has left the store")));
    return LeftBehind(member.rank, behind);
  }

  // The member's plane is destroyed.
  void Drop(uint64_t id) {
    const absl::MutexLock lock(&mu_);
    Member& member = members_[id];
    Leave(member, absl::UnavailableError(absl::StrCat("rank ", member.rank, " is gone")));
    members_.erase(id);
  }

 private:
  struct Link {
    uint64_t peer_id;
    CreditQueue queue;   // to the peer
    uint64_t taken = 0;  // bytes taken of what the peer sent
  };
  struct Member {
    int rank = 0;
    std::set<int> calls;
    bool left = false, closing = false, closed = false;
    std::map<int, Link> links;  // by the peer's rank
    Inbox inbox;
    uint64_t bytes_sent = 0;
    SteadyCondVar changed;
  };

  // Connects one end.
  void Connect(uint64_t id, uint64_t peer_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Member& member = members_[id];
    const int peer = members_[peer_id].rank;
    member.links.emplace(peer, Link{.peer_id = peer_id, .queue = CreditQueue(limits_.credit)});
    member.inbox.Join(peer);
    member.changed.SignalAll();
  }

  // Moves messages as far as the credit allows.
  void Move(Member& from, Link& link) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Member& peer = members_[link.peer_id];
    while (std::optional<CreditQueue::Outgoing> message = link.queue.Pop(Clock::now())) {
      from.bytes_sent += message->head.size() + message->body.size();
      peer.inbox.Add({.peer = from.rank,
                      .priority = message->priority,
                      .head = std::move(message->head),
                      .body = std::move(message->body)});
      peer.changed.SignalAll();
    }
  }

  static bool Idle(const Member& member) {
    for (const auto& [peer, link] : member.links) {
      if (!link.queue.idle()) return false;
    }
    return true;
  }

  // Its peers lose the member.
  void Leave(Member& member, const absl::Status& reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (std::exchange(member.left, true)) return;
    for (const auto& [rank, link] : member.links) {
      Member& peer = members_[link.peer_id];
      peer.links.erase(member.rank);
      peer.inbox.Lose(member.rank, reason);
      peer.changed.SignalAll();
    }
    member.links.clear();
    member.changed.SignalAll();
    ranks_.erase(member.rank);
  }

  absl::Status NothingCame(const Member& member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::string missing;
    for (const int peer : member.calls) {
      if (!member.links.contains(peer)) {
        absl::StrAppend(&missing, "; rank ", peer, " is not connected: it has not joined");
      }
    }
    return absl::DeadlineExceededError(
        absl::StrCat("no message came to rank ", member.rank, " in time", missing));
  }

  static absl::Status Closed(const Member& member) {
    return absl::CancelledError(absl::StrCat("the plane of rank ", member.rank, " is closed"));
  }

  const MessageLimits limits_;
  mutable absl::Mutex mu_;
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
  std::map<uint64_t, Member> members_ ABSL_GUARDED_BY(mu_);
  std::map<int, uint64_t> ranks_ ABSL_GUARDED_BY(mu_);  // only members that have not left
};

namespace {

class InProcessMessages final : public MessagePlane {
 public:
  InProcessMessages(std::shared_ptr<MessageHub> hub, int rank, std::vector<int> calls)
      : hub_(std::move(hub)), rank_(rank), id_(hub_->Join(rank, std::move(calls))) {}
  ~InProcessMessages() override { hub_->Drop(id_); }

  int rank() const override { return rank_; }
  absl::Status Send(int peer, int priority, std::string head, std::vector<uint8_t> body) override {
    return hub_->Send(id_, peer,
                      {.priority = priority, .head = std::move(head), .body = std::move(body)});
  }
  absl::StatusOr<MessageEvent> Receive(Deadline deadline) override {
    return hub_->Receive(id_, deadline);
  }
  uint64_t bytes_sent() const override { return hub_->BytesSent(id_); }
  absl::Status Close(Deadline deadline) override { return hub_->Close(id_, deadline); }

 private:
  const std::shared_ptr<MessageHub> hub_;
  const int rank_;
  const uint64_t id_;
};

}  // namespace

std::shared_ptr<MessageHub> MakeMessageHub(const MessageLimits& limits) {
  return std::make_shared<MessageHub>(limits);
}

std::unique_ptr<MessagePlane> JoinMessageHub(std::shared_ptr<MessageHub> hub, int rank,
                                             std::vector<int> calls) {
  return std::make_unique<InProcessMessages>(std::move(hub), rank, std::move(calls));
}

}  // namespace thinwire
