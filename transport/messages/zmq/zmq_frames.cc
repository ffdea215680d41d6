#include "transport/messages/zmq/zmq_frames.h"

#include <algorithm>
#include <type_traits>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

constexpr size_t kGreetingBytes = 1 + 4 + 4 + 4 + 8 + 8 + 4;

template <typename Number>
uint8_t* Put(Number number, uint8_t* to) {
  auto bits = static_cast<std::make_unsigned_t<Number>>(number);
  for (size_t i = 0; i < sizeof(Number); ++i) to[i] = static_cast<uint8_t>(bits >> (8 * i));
  return to + sizeof(Number);
}

template <typename Number>
const uint8_t* Get(const uint8_t* from, Number* number) {
  std::make_unsigned_t<Number> bits = 0;
  for (size_t i = 0; i < sizeof(Number); ++i) {
    bits |= static_cast<std::make_unsigned_t<Number>>(from[i]) << (8 * i);
  }
  *number = static_cast<Number>(bits);
  return from + sizeof(Number);
}

std::string Frame(FrameKind kind, size_t bytes) {
  std::string frame(bytes, '\0');
  frame[0] = static_cast<char>(kind);
  return frame;
}

uint8_t* After(std::string& frame) { return reinterpret_cast<uint8_t*>(frame.data()) + 1; }

std::string GreetingFrame(FrameKind kind, const Greeting& greeting) {
  std::string frame = Frame(kind, kGreetingBytes);
  uint8_t* to = Put(greeting.protocol, After(frame));
  to = Put(greeting.to, Put(greeting.from, to));
  to = Put(greeting.max_message, Put(greeting.credit, to));
  Put(greeting.timeout_ms, to);
  return frame;
}

absl::Status Differs(const char* what, uint64_t theirs, uint64_t ours) {
  return absl::FailedPreconditionError(
      absl::StrCat(what, " is ", theirs, " there and ", ours,
                   " here; all members of a store are started with the same settings"));
}

}  // namespace

absl::Status Greeting::Check(int rank, const MessageLimits& limits) const {
  if (protocol != kMessageProtocol) {
    return Differs("the version of the messages' frames", protocol, kMessageProtocol);
  }
  if (to != rank) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", from, " takes this member for rank ", to, ", which is rank ", rank,
                     "; the address that it has is of another member"));
  }
  if (credit != limits.credit) return Differs("the credit in bytes", credit, limits.credit);
  if (max_message != limits.max_message) {
    return Differs("the largest message in bytes", max_message, limits.max_message);
  }
  const auto ours = static_cast<uint64_t>(limits.timeout.count());
  if (timeout_ms != ours) return Differs("the timeout in milliseconds", timeout_ms, ours);
  return absl::OkStatus();
}

std::string HelloFrame(const Greeting& greeting) {
  return GreetingFrame(FrameKind::kHello, greeting);
}
std::string WelcomeFrame(const Greeting& greeting) {
  return GreetingFrame(FrameKind::kWelcome, greeting);
}
std::string RefusedFrame(std::string_view why) {
  std::string frame = Frame(FrameKind::kRefused, 1);
  frame.append(why);
  return frame;
}
std::string TakenFrame(uint64_t taken) {
  std::string frame = Frame(FrameKind::kTaken, 1 + sizeof(taken));
  Put(taken, After(frame));
  return frame;
}
std::string PlainFrame(FrameKind kind) { return Frame(kind, 1); }

void WritePieceHeader(const MessagePiece& piece, uint8_t* to) {
  *to++ = static_cast<uint8_t>(FrameKind::kPiece);
  to = Put(piece.head_bytes, Put(piece.priority, Put(piece.number, to)));
  Put(piece.offset, Put(piece.body_bytes, to));
}

std::optional<FrameKind> KindOf(Bytes frame) {
  if (frame.empty() || frame[0] < static_cast<uint8_t>(FrameKind::kHello) ||
      frame[0] > static_cast<uint8_t>(FrameKind::kReset)) {
    return std::nullopt;
  }
  return static_cast<FrameKind>(frame[0]);
}

std::optional<Greeting> ReadGreeting(Bytes frame) {
  const auto kind = KindOf(frame);
  if ((kind != FrameKind::kHello && kind != FrameKind::kWelcome) ||
      frame.size() != kGreetingBytes) {
    return std::nullopt;
  }
  Greeting greeting;
  const uint8_t* from = Get(frame.data() + 1, &greeting.protocol);
  from = Get(Get(from, &greeting.from), &greeting.to);
  from = Get(Get(from, &greeting.credit), &greeting.max_message);
  Get(from, &greeting.timeout_ms);
  return greeting;
}

std::string ReadRefusal(Bytes frame) {
  if (KindOf(frame) != FrameKind::kRefused) return "";
  const Bytes text = frame.subspan(1, std::min<size_t>(frame.size() - 1, 1000));
  return std::string(text.begin(), text.end());
}

std::optional<uint64_t> ReadTaken(Bytes frame) {
  uint64_t taken = 0;
  if (KindOf(frame) != FrameKind::kTaken || frame.size() != 1 + sizeof(taken)) return std::nullopt;
  Get(frame.data() + 1, &taken);
  return taken;
}

std::optional<MessagePiece> ReadPiece(Bytes frame, Bytes* part) {
  if (KindOf(frame) != FrameKind::kPiece || frame.size() < kPieceHeader) return std::nullopt;
  MessagePiece piece;
  const uint8_t* from = Get(frame.data() + 1, &piece.number);
  from = Get(Get(from, &piece.priority), &piece.head_bytes);
  Get(Get(from, &piece.body_bytes), &piece.offset);
  *part = frame.subspan(kPieceHeader);
  // An empty part is that of an empty message. The sum of sizes does not overflow: the body is
  // bounded first.
  if (piece.body_bytes > (uint64_t{1} << 62)) return std::nullopt;
  const uint64_t bytes = piece.head_bytes + piece.body_bytes;
  if (piece.offset > bytes || part->size() > bytes - piece.offset) return std::nullopt;
  if (part->empty() && bytes != 0) return std::nullopt;
  return piece;
}

}  // namespace thinwire
