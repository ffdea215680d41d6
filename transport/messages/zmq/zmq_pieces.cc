#include "transport/messages/zmq/zmq_pieces.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thinwire {

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
  // Nobody sends a long head; a stray size shall not take memory before its bytes are there.
  partial_->body.reserve(std::min<uint64_t>(piece.body_bytes, uint64_t{64} << 20));
  return absl::OkStatus();
}

}  // namespace thinwire
