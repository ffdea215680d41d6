#include "transport/board.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace thinwire {
namespace {

constexpr absl::string_view kAnswer = "answer ", kFailure = "failure ";

std::string KeyOf(const Board& board, std::string_view topic, int rank) {
  return absl::StrCat(board.prefix, board.subject, "/", std::string(topic), "/", rank);
}

// Hexadecimal, because stores differ in whether they take every byte.
std::string TextOf(const absl::StatusOr<std::string>& answer) {
  return answer.ok() ? absl::StrCat(kAnswer, absl::BytesToHexString(*answer))
                     : absl::StrCat(kFailure, answer.status().message());
}

absl::StatusOr<std::string> AnswerIn(absl::string_view text) {
  if (absl::ConsumePrefix(&text, kAnswer)) return absl::HexStringToBytes(text);
  absl::ConsumePrefix(&text, kFailure);
  return absl::UnimplementedError(text);
}

}  // namespace

absl::StatusOr<Answers> TellAll(const Board& board, std::string_view topic,
                                const absl::StatusOr<std::string>& mine) {
  const auto [rank, size] = board.members;
  if (absl::Status bad = board.store.Set(KeyOf(board, topic, rank), TextOf(mine)); !bad.ok()) {
    return bad;
  }
  Answers answers;
  for (int peer = 0; peer < size; ++peer) {
    const absl::StatusOr<std::string> text =
        board.store.Get(KeyOf(board, topic, peer), board.deadline);
    if (absl::IsDeadlineExceeded(text.status())) {
      return absl::DeadlineExceededError(absl::StrCat(
          "rank ", peer, " told rank ", rank, " nothing of its ", board.subject, " (",
          std::string(topic), ") in time; look what that rank does, or raise the timeout"));
    }
    if (!text.ok()) return text.status();
    answers.push_back(AnswerIn(*text));
  }
  return answers;
}

absl::Status FirstRefusal(const Board& board, const Answers& answers) {
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    if (answers[rank].ok()) continue;
    return absl::UnimplementedError(absl::StrCat("rank ", rank, " takes no part over ",
                                                 board.subject, ": ",
                                                 answers[rank].status().message()));
  }
  return absl::OkStatus();
}

}  // namespace thinwire
