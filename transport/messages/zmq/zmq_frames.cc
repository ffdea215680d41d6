#include "transport/messages/zmq/zmq_frames.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

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
  // An empty part belongs to an empty message. The sum of sizes does not overflow: the body is
  // bounded first.
  if (piece.body_bytes > (uint64_t{1} << 62)) return std::nullopt;
  const uint64_t bytes = piece.head_bytes + piece.body_bytes;
  if (piece.offset > bytes || part->size() > bytes - piece.offset) return std::nullopt;
  if (part->empty() && bytes != 0) return std::nullopt;
  return piece;
}

// Pieces.

PieceCutter::PieceCutter(uint64_t number, CreditQueue::Outgoing message)
    : message_(std::move(message)),
      bytes_(message_.head.size() + message_.body.size()),
      piece_{.number = number,
             .priority = message_.priority,
             .head_bytes = static_cast<uint32_t>(message_.head.size()),
             .body_bytes = message_.body.size(),
             .offset = 0} {}

size_t PieceCutter::part_bytes() const {
  return std::min<size_t>(kMostPieceBytes, bytes_ - piece_.offset);
}

size_t PieceCutter::next_bytes() const { return kPieceHeader + part_bytes(); }

void PieceCutter::WriteNext(uint8_t* to) {
  const size_t count = part_bytes();
  WritePieceHeader(piece_, to);
  to += kPieceHeader;
  const size_t head_from = std::min<size_t>(piece_.offset, message_.head.size());
  const size_t of_head = std::min(count, message_.head.size() - head_from);
  const size_t body_from = piece_.offset + of_head - message_.head.size();
  if (of_head != 0) std::memcpy(to, message_.head.data() + head_from, of_head);
  if (count != of_head) {
    std::memcpy(to + of_head, message_.body.data() + body_from, count - of_head);
  }
  piece_.offset += count;
  done_ = piece_.offset == bytes_;
}

absl::StatusOr<std::optional<Message>> PieceJoiner::Take(Bytes frame, const MessageLimits& limits,
                                                         uint64_t taken) {
  Bytes part;
  const std::optional<MessagePiece> piece = ReadPiece(frame, &part);
  if (!piece.has_value()) return absl::DataLossError("a piece of a message can't be read");
  const size_t bytes = piece->head_bytes + piece->body_bytes;
  const size_t have = partial_.has_value() ? partial_->head.size() + partial_->body.size() : 0;
  if (piece->number != messages_ || piece->offset != have ||
      (partial_.has_value() && bytes != partial_bytes_)) {
    return absl::DataLossError(absl::StrCat("message ", messages_, " was expected from byte ", have,
                                            " on, and message ", piece->number, " came from byte ",
                                            piece->offset, " on"));
  }
  if (!partial_.has_value()) {
    if (absl::Status bad = Begin(*piece, limits, taken); !bad.ok()) return bad;
  }
  const size_t to_head = std::min<size_t>(part.size(), piece->head_bytes - partial_->head.size());
  partial_->head.append(part.begin(), part.begin() + static_cast<ptrdiff_t>(to_head));
  part = part.subspan(to_head);
  partial_->body.insert(partial_->body.end(), part.begin(), part.end());
  if (partial_->head.size() + partial_->body.size() != bytes) return std::nullopt;
  ++messages_;
  return std::exchange(partial_, std::nullopt);
}

absl::Status PieceJoiner::Begin(const MessagePiece& piece, const MessageLimits& limits,
                                uint64_t taken) {
  const size_t bytes = piece.head_bytes + piece.body_bytes;
  if (bytes > limits.max_message) {
    return absl::DataLossError(
        absl::StrCat("it sends ", bytes, " bytes, where ", limits.max_message, " are allowed"));
  }
  const uint64_t waiting = received_ - taken;
  const size_t cost = bytes + kMessageCost;
  if (waiting != 0 && waiting + cost > limits.credit) {
    return absl::DataLossError(absl::StrCat("it has sent ", waiting + cost,
                                            " bytes that were not taken, where ", limits.credit,
                                            " are allowed"));
  }
  received_ += cost;
  partial_bytes_ = bytes;
  partial_.emplace();
  partial_->peer = peer_;
  partial_->priority = piece.priority;
  // Heads are short; a wrong size must not allocate memory before its bytes have arrived.
  partial_->body.reserve(std::min<uint64_t>(piece.body_bytes, uint64_t{64} << 20));
  return absl::OkStatus();
}

}  // namespace thinwire
