#include "transport/ucx/ucx_board.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace thinwire {
namespace {

constexpr absl::string_view kAnswer = "answer ", kFailure = "failure ";

std::string KeyOf(const UcxOptions& options, std::string_view topic, int rank) {
  return absl::StrCat(options.prefix, "ucx/", std::string(topic), "/", rank);
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

absl::StatusOr<UcxAnswers> TellAll(const UcxOptions& options, std::string_view topic,
                                   const absl::StatusOr<std::string>& mine) {
  Store& store = *options.store;
  if (absl::Status bad = store.Set(KeyOf(options, topic, options.rank), TextOf(mine)); !bad.ok()) {
    return bad;
  }
  UcxAnswers answers;
  for (int peer = 0; peer < options.size; ++peer) {
    const absl::StatusOr<std::string> text =
        store.Get(KeyOf(options, topic, peer), options.deadline);
    if (absl::IsDeadlineExceeded(text.status())) {
      return absl::DeadlineExceededError(absl::StrCat(
          "rank ", peer, " told rank ", options.rank, " nothing of its UCX (", std::string(topic),
          ") in time; look what that rank does, or raise the timeout"));
    }
    if (!text.ok()) return text.status();
    answers.push_back(AnswerIn(*text));
  }
  return answers;
}

absl::Status FirstRefusal(const UcxAnswers& answers) {
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    if (answers[rank].ok()) continue;
    return absl::UnimplementedError(
        absl::StrCat("rank ", rank, " takes no part over UCX: ", answers[rank].status().message()));
  }
  return absl::OkStatus();
}

}  // namespace thinwire
