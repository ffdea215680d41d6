#include "transport/mesh/challenge.h"

#include <cstdint>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "transport/mesh/group_key.h"

namespace thinwire {
namespace {

constexpr char kHelloWord[] = "tw1hello", kReplyWord[] = "tw1reply", kProofWord[] = "tw1proof",
               kAdmissionWord[] = "tw1admit";
constexpr size_t kWordBytes = sizeof(kHelloWord) - 1, kRankBytes = 4, kNonceBytes = 32;
constexpr size_t kDigestAt = kWordBytes + 2 * kRankBytes;
constexpr size_t kGreetingBytes = kDigestAt + kMacBytes + kNonceBytes + kMacBytes;
constexpr size_t kProofBytes = kWordBytes + kMacBytes;

std::string RankBytes(int rank) {
  std::string bytes;
  for (size_t i = 0; i < kRankBytes; ++i) {
    bytes.push_back(static_cast<char>(static_cast<uint32_t>(rank) >> (8 * i)));
  }
  return bytes;
}

// A number beyond int's range becomes negative, which is no valid rank.
int RankAt(std::string_view message, size_t place) {
  uint32_t rank = 0;
  for (size_t i = 0; i < kRankBytes; ++i) {
    rank |= uint32_t{static_cast<uint8_t>(message[place + i])} << (8 * i);
  }
  return static_cast<int>(rank);
}

int SenderOf(std::string_view greeting) { return RankAt(greeting, kWordBytes); }
int ReceiverOf(std::string_view greeting) { return RankAt(greeting, kWordBytes + kRankBytes); }

absl::Status Stranger(const char* why) { return absl::PermissionDeniedError(why); }

bool BeginsWith(std::string_view message, const char* word) {
  return message.substr(0, kWordBytes) == word;
}

}  // namespace

Challenge Challenge::AsClient(const Identity& self, int server) {
  Challenge challenge(self, server, Awaits::kReply);
  challenge.transcript_ = challenge.Signed(challenge.Greeting(kHelloWord));
  return challenge;
}

Challenge Challenge::AsServer(const Identity& self) { return {self, -1, Awaits::kHello}; }

size_t Challenge::awaited() const {
  switch (awaits_) {
    case Awaits::kHello:
    case Awaits::kReply: return kGreetingBytes;
    case Awaits::kProof:
    case Awaits::kAdmission: return kProofBytes;
    case Awaits::kNothing: break;
  }
  return 0;
}

absl::Status Challenge::Take(std::string_view message, std::string* answer) {
  answer->clear();
  if (message.size() != awaited()) return Stranger("a message of another length");
  switch (awaits_) {
    case Awaits::kHello: return TakeHello(message, answer);
    case Awaits::kReply: return TakeReply(message, answer);
    case Awaits::kProof: return TakeProof(message, answer);
    case Awaits::kAdmission: return TakeAdmission(message);
    case Awaits::kNothing: break;
  }
  return Stranger("a message after the admission");
}

absl::Status Challenge::TakeHello(std::string_view message, std::string* answer) {
  if (!BeginsWith(message, kHelloWord) || !IsSigned(message)) {
    return Stranger("a hello without the group's key");
  }
  const int from = SenderOf(message);
  if (ReceiverOf(message) != self_->rank || from <= self_->rank || from >= self_->size) {
    return Stranger("a hello of another pair of ranks");
  }
  peer_ = from;
  transcript_ = std::string(message);
  *answer = Signed(Greeting(kReplyWord));
  transcript_ += *answer;
  awaits_ = Awaits::kProof;
  return CompareDigest(message);
}

absl::Status Challenge::TakeReply(std::string_view message, std::string* answer) {
  if (!BeginsWith(message, kReplyWord) || !IsSigned(message)) {
    return Stranger("a reply without the group's key, or to another hello");
  }
  if (SenderOf(message) != peer_ || ReceiverOf(message) != self_->rank) {
    return Stranger("a reply of another pair of ranks");
  }
  if (absl::Status differs = CompareDigest(message); !differs.ok()) return differs;
  transcript_ += std::string(message);
  *answer = Signed(kProofWord);
  awaits_ = Awaits::kAdmission;
  return absl::OkStatus();
}

absl::Status Challenge::TakeProof(std::string_view message, std::string* answer) {
  if (!BeginsWith(message, kProofWord) || !IsSigned(message)) {
    return Stranger("a hello that was recorded, since its proof is of another reply");
  }
  *answer = Signed(kAdmissionWord);
  awaits_ = Awaits::kNothing;
  return absl::OkStatus();
}

absl::Status Challenge::TakeAdmission(std::string_view message) {
  if (!BeginsWith(message, kAdmissionWord) || !IsSigned(message)) {
    return Stranger("an admission without the group's key");
  }
  awaits_ = Awaits::kNothing;
  return absl::OkStatus();
}

std::string Challenge::Greeting(std::string_view word) const {
  return absl::StrCat(std::string(word), RankBytes(self_->rank), RankBytes(peer_), self_->digest,
                      RandomBytes(kNonceBytes));
}

std::string Challenge::Signed(std::string text) const {
  return text + self_->key.Mac(transcript_ + text);
}

bool Challenge::IsSigned(std::string_view message) const {
  const size_t length = message.size() - kMacBytes;
  const std::string covered = transcript_ + std::string(message.substr(0, length));
  return SameBytes(self_->key.Mac(covered), message.substr(length));
}

absl::Status Challenge::CompareDigest(std::string_view greeting) const {
  if (SameBytes(greeting.substr(kDigestAt, kMacBytes), self_->digest)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", peer_, " is set up in another way than rank ", self_->rank,
                   "; use the same options and the same version on every rank"));
}

}  // namespace thinwire
