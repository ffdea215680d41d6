// The frames that two planes exchange over a connection of ZeroMQ, as bytes. No sockets.
//
// The caller's first frame is a greeting; the answer is a greeting or a refusal. Then messages go
// both ways in pieces, which are numbered by message in each direction: large messages have many
// pieces, so that a receiver on a slow link gets something before the whole message has arrived.
// PieceCutter cuts messages into pieces, and PieceJoiner joins them, within the limits that the
// greeting settled. Numbers are little-endian.
#ifndef THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_FRAMES_H_
#define THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_FRAMES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/types.h"
#include "transport/messages/message_plane.h"
#include "transport/messages/queues.h"

namespace thinwire {

inline constexpr uint32_t kMessageProtocol = 1;  // the version of these frames

enum class FrameKind : uint8_t {
  kHello = 1,    // a Greeting from the caller
  kWelcome = 2,  // a Greeting from the member that was called
  kRefused = 3,  // a text: why the caller is not, or no longer, a member and must not call again
  kPiece = 4,    // a MessagePiece and its bytes
  kTaken = 5,    // a uint64: the credit that was returned since the connection began
  kAlive = 6,    // nothing
  kGoodbye = 7,  // nothing: the sender has left the store
  kReset = 8,    // nothing: the receiver has lost this connection, or does not know it
};

// A greeting identifies both ends and carries the settings on which they must agree.
struct Greeting {
  uint32_t protocol = kMessageProtocol;
  int32_t from = 0, to = 0;
  uint64_t credit = 0, max_message = 0;
  uint32_t timeout_ms = 0;

  // FailedPrecondition if the greeting does not fit its receiver: member `rank` with these limits.
  absl::Status Check(int rank, const MessageLimits& limits) const;
};

// A part of a message: of its head followed by its body, counted as one.
struct MessagePiece {
  uint64_t number = 0;  // of the message, from 0 in each direction of a connection
  int32_t priority = 0;
  uint32_t head_bytes = 0;
  uint64_t body_bytes = 0;
  uint64_t offset = 0;  // of the part, in bytes
};

inline constexpr size_t kPieceHeader = 1 + 8 + 4 + 4 + 8 + 8;
inline constexpr size_t kMostPieceBytes = 128 * 1024;
// The most bytes in a frame, including CURVE's own.
inline constexpr size_t kMostFrameBytes = kPieceHeader + kMostPieceBytes + 256;

std::string HelloFrame(const Greeting& greeting);
std::string WelcomeFrame(const Greeting& greeting);
std::string RefusedFrame(std::string_view why);
std::string TakenFrame(uint64_t taken);
std::string PlainFrame(FrameKind kind);
// Writes kPieceHeader bytes.
void WritePieceHeader(const MessagePiece& piece, uint8_t* to);

// Readers return nullopt or "" if the frame is of another kind, too short or too long.
std::optional<FrameKind> KindOf(Bytes frame);
std::optional<Greeting> ReadGreeting(Bytes frame);
std::string ReadRefusal(Bytes frame);
std::optional<uint64_t> ReadTaken(Bytes frame);
// `part` becomes the bytes of the message that the frame carries; they lie within its head and
// body.
std::optional<MessagePiece> ReadPiece(Bytes frame, Bytes* part);

class PieceCutter {
 public:
  // `number`: of the message, from 0.
  PieceCutter(uint64_t number, CreditQueue::Outgoing message);

  // An empty message has one piece.
  bool done() const { return done_; }
  size_t next_bytes() const;  // of the next piece's frame
  void WriteNext(uint8_t* to);

 private:
  size_t part_bytes() const;

  const CreditQueue::Outgoing message_;
  const size_t bytes_;  // of head and body together
  MessagePiece piece_;
  bool done_ = false;
};

class PieceJoiner {
 public:
  explicit PieceJoiner(int peer) : peer_(peer) {}

  // Returns the message that the piece completes, or nullopt. `taken`: bytes of credit of the
  // messages that were taken from this peer. DataLoss has the reason why the connection can't go
  // on.
  absl::StatusOr<std::optional<Message>> Take(Bytes frame, const MessageLimits& limits,
                                              uint64_t taken);

 private:
  absl::Status Begin(const MessagePiece& piece, const MessageLimits& limits, uint64_t taken);

  int peer_;
  uint64_t messages_ = 0;  // number of complete ones
  uint64_t received_ = 0;  // bytes of credit that the peer has used
  std::optional<Message> partial_;
  size_t partial_bytes_ = 0;  // size of the complete head and body together
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_FRAMES_H_
