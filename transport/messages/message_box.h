// MessageBox: the state of a MessagePlane that its owner's threads and the transport's thread
// share. The owner's half implements MessagePlane; the transport's half moves messages and reports
// peers that come and go.
#ifndef THINWIRE_TRANSPORT_MESSAGES_MESSAGE_BOX_H_
#define THINWIRE_TRANSPORT_MESSAGES_MESSAGE_BOX_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "transport/messages/message_plane.h"
#include "transport/messages/queues.h"
#include "transport/steady_cond_var.h"

namespace thinwire {

// Thread-safe.
class MessageBox {
 public:
  // `wake` tells the transport that Collect has something for it. It is called on any thread, with
  // no lock held, and must not block.
  MessageBox(int rank, const MessageLimits& limits, std::function<void()> wake)
      : rank_(rank), limits_(limits), wake_(std::move(wake)) {}

  // The owner's half.
  absl::Status Send(int peer, CreditQueue::Outgoing message);
  absl::StatusOr<MessageEvent> Receive(Deadline deadline);
  uint64_t bytes_sent() const;
  // Waits until all peers have taken everything, or until the deadline, and returns the result of
  // MessagePlane::Close; nullopt to a second caller. Once it has begun nothing can be sent, and
  // once it has returned nothing can be received.
  std::optional<absl::Status> Close(Deadline deadline);

  // The transport's half.
  void Join(int peer);
  // Drops what is queued for the peer, and what has arrived from it and was not taken. Allowed for
  // a peer that has never joined: its event has the reason.
  void Lose(int peer, absl::Status reason);
  void Add(Message message);  // from a peer that has joined
  // The peer has taken `taken` bytes, counted since it joined. False if that is more than was sent.
  // The next Collect returns the messages for which the credit then suffices.
  bool Acknowledge(int peer, uint64_t taken);
  // Bytes from this peer that were taken since it joined.
  uint64_t TakenFrom(int peer) const;
  // Sets why a peer that is called is not connected; Receive reports it at its deadline.
  void SetMissing(int peer, std::string why);

  // For one peer: messages that leave now, in order, and the count to acknowledge.
  struct Departure {
    int peer = 0;
    std::optional<uint64_t> taken;
    std::vector<CreditQueue::Outgoing> messages;
  };
  std::vector<Departure> Collect();

 private:
  struct Link {
    CreditQueue queue;
    uint64_t taken = 0, told = 0;  // bytes taken here, and the count last acknowledged
    size_t waiting = 0;            // messages in the inbox
    // True if the peer must get an acknowledgement. Not for every message, since small ones would
    // cost one each, but once no message is left here, so that the peer does not wait for credit
    // that is free, and once a slice of bytes is unacknowledged.
    bool TellsTaken(size_t credit) const {
      return taken != told &&
             (waiting == 0 || taken - told >= std::min(credit / 8, SendWindow::kLeastSlice));
    }
  };

  // True if the caller must call wake_ after the lock.
  bool NeedsWaking() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !std::exchange(woken_, true); }
  bool Idle() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status NothingCame() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status Closed() const;

  const int rank_;
  const MessageLimits limits_;
  const std::function<void()> wake_;

  mutable absl::Mutex mu_;
  SteadyCondVar changed_;
  std::map<int, Link> links_ ABSL_GUARDED_BY(mu_);
  std::map<int, std::string> missing_ ABSL_GUARDED_BY(mu_);
  Inbox inbox_ ABSL_GUARDED_BY(mu_);
  uint64_t bytes_sent_ ABSL_GUARDED_BY(mu_) = 0;
  bool woken_ ABSL_GUARDED_BY(mu_) = false;  // since the last Collect
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESSAGES_MESSAGE_BOX_H_
