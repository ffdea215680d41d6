// Resender: what a worker sends to one server. Without a journal of the server's it only passes on.
// With one, and before the server has said whether there is one, it keeps every message until its
// answer has come, and sends them all again, in their order, when the server is back; what is sent
// meanwhile waits behind them.
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

// Thread-safe. Its lock orders what is sent before and after a loss, so it is held over the plane's
// Send, which never waits.
class Resender {
 public:
  // `peer`: the server's rank in the roster.
  Resender(MessagePlane& plane, int peer) : plane_(plane), peer_(peer) {}

  // As the plane's Send; OK for a server with a journal that is away.
  absl::Status Send(int priority, const StoreHead& head, std::vector<uint8_t> body);
  // A message of the server: it answers one of these, and a kDone tells whether it has a journal.
  void OnAnswer(const StoreHead& answer);
  // True if the server may come back: it may have a journal, and has neither left nor refused.
  bool OnLost(const absl::Status& reason, Deadline now);
  void OnJoined();

  // The loss, if the server has been away since before `since`; else OK.
  absl::Status LostBefore(Deadline since) const;
  bool has_journal() const;
  bool is_empty() const;

 private:
  // The answer to a message: its kind, its slice, its number or request.
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
  bool has_journal_ ABSL_GUARDED_BY(mu_) = true;  // until it says that it has none
  uint64_t sent_ ABSL_GUARDED_BY(mu_) = 0;
  // Those with the same answer in their order.
  std::multimap<Answer, Sent> unanswered_ ABSL_GUARDED_BY(mu_);
  std::optional<Deadline> lost_since_ ABSL_GUARDED_BY(mu_);
  absl::Status loss_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_HOST_RESENDER_H_
