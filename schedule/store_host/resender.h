// Resender: sends a worker's messages to one server. If the server has no journal, it only passes
// them on. If the server has one, or has not yet said whether it has, it keeps every message until
// the answer arrives. When a lost server is back, it sends all kept messages again, in order;
// messages that are sent in the meantime wait behind them.
#ifndef THINWIRE_SCHEDULE_STORE_HOST_RESENDER_H_
#define THINWIRE_SCHEDULE_STORE_HOST_RESENDER_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "schedule/store/frames.h"
#include "transport/messages/message_plane.h"

namespace thinwire {

// Thread-safe. Its lock keeps messages in order across a loss, so it is held during the plane's
// Send, which never waits.
class Resender {
 public:
  // `peer`: the server's rank in the roster.
  Resender(MessagePlane& plane, int peer) : plane_(plane), peer_(peer) {}

  // Like the plane's Send, but OK if a server with a journal is lost.
  absl::Status Send(int priority, const StoreHead& head, std::vector<uint8_t> body);
  // Call with each message from the server. Drops the kept messages that it answers; kWelcome and
  // kDone say whether the server has a journal.
  void OnAnswer(const StoreHead& answer);
  // True if the server may come back: it may have a journal, and has neither closed its plane nor
  // refused this worker.
  bool OnLost(const absl::Status& reason, Deadline now);
  void OnJoined();

  // The reason of the loss if the server was lost before `since` and is not back; else OK.
  absl::Status LostBefore(Deadline since) const;
  bool has_journal() const;
  bool is_empty() const;

 private:
  // Identifies an answer: kind, slice, number or request.
  using Answer = std::tuple<StoreHead::Kind, uint32_t, uint64_t>;
  static Answer AnswerOf(const StoreHead& head);

  struct Sent {
    uint64_t order = 0;
    int priority = 0;
    StoreHead head;
    std::vector<uint8_t> body;
  };

  absl::Status SendByPlane(int priority, const StoreHead& head, std::vector<uint8_t> body) {
    return plane_.Send(peer_, priority, head.ToBytes(), std::move(body));
  }

  MessagePlane& plane_;
  const int peer_;
  mutable absl::Mutex mu_;
  bool has_journal_ ABSL_GUARDED_BY(mu_) = true;  // until the server says that it has none
  uint64_t sent_ ABSL_GUARDED_BY(mu_) = 0;
  // By answer; messages with the same answer in the order of Send.
  std::multimap<Answer, Sent> unanswered_ ABSL_GUARDED_BY(mu_);
  std::optional<Deadline> lost_since_ ABSL_GUARDED_BY(mu_);
  absl::Status loss_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_HOST_RESENDER_H_
