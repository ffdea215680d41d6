// The messages of one connection as pieces, which are numbered by message in each direction:
// PieceCutter makes them of a message, and PieceJoiner makes messages of them, within the limits
// that the greeting has settled. Neither knows sockets.
#ifndef THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_PIECES_H_
#define THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_PIECES_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "transport/messages/message_plane.h"
#include "transport/messages/queues.h"
#include "transport/messages/zmq/zmq_frames.h"

namespace thinwire {

class PieceCutter {
 public:
  // `number`: of the message, from 0.
  PieceCutter(uint64_t number, CreditQueue::Outgoing message);

  // An empty message is one piece.
  bool done() const { return done_; }
  size_t next_bytes() const;  // of the next piece's frame
  void WriteNext(uint8_t* to);

 private:
  size_t part_bytes() const;

  const CreditQueue::Outgoing message_;
  const size_t bytes_;  // of head and body
  MessagePiece piece_;
  bool done_ = false;
};

class PieceJoiner {
 public:
  explicit PieceJoiner(int peer) : peer_(peer) {}

  // The message that the piece completes, or nullopt. `taken`: the credit of messages that were
  // taken from this peer. DataLoss says why the connection can't go on.
  absl::StatusOr<std::optional<Message>> Take(Bytes frame, const MessageLimits& limits,
                                              uint64_t taken);

 private:
  absl::Status Begin(const MessagePiece& piece, const MessageLimits& limits, uint64_t taken);

  int peer_;
  uint64_t messages_ = 0;  // complete ones
  uint64_t received_ = 0;  // credit that the peer has used
  std::optional<Message> partial_;
  size_t partial_bytes_ = 0;  // of head and body together, when it is complete
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_PIECES_H_
