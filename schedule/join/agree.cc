#include "schedule/join/agree.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "schedule/join/guards.h"
#include "schedule/order/frames.h"
#include "transport/planes.h"

namespace thinwire {
namespace {

// An answer on the wire (little-endian hosts). All have the same size, so no rank has to send it.
struct Note {
  uint32_t is_here = 0;  // 1 in every note that is sent
  uint32_t is_failure = 0;
  uint32_t bytes = 0;
  uint32_t reserved = 0;
  char text[kMostAnswerBytes] = {};
};
static_assert(sizeof(Note) == 4096 && std::is_trivially_copyable_v<Note>);

Note NoteOf(const absl::StatusOr<std::string>& answer) {
  if (answer.ok() && answer->size() > kMostAnswerBytes) {
    return NoteOf(absl::InternalError(absl::StrCat("its answer has ", answer->size(),
                                                   " bytes, expected at most ", kMostAnswerBytes)));
  }
  const absl::string_view text = answer.ok() ? *answer : answer.status().message();
  Note note;
  note.is_here = 1;
  note.is_failure = answer.ok() ? 0 : 1;
  note.bytes = static_cast<uint32_t>(std::min(text.size(), kMostAnswerBytes));
  std::memcpy(note.text, text.data(), note.bytes);
  return note;
}

absl::StatusOr<std::string> AnswerIn(const Note& note) {
  std::string text(note.text, std::min<size_t>(note.bytes, kMostAnswerBytes));
  if (note.is_failure == 0) return text;
  return absl::UnimplementedError(text);
}

// The same tag in every process.
uint64_t TagOf(const Board& board, std::string_view topic) {
  const std::string text = absl::StrCat(board.subject, "/", std::string(topic), "/", board.first,
                                        "/", board.members.size);
  return Crc32c(0, {reinterpret_cast<const uint8_t*>(text.data()), text.size()});
}

// Each peer has its own exchange, so that the others' answers arrive even if one peer is late.
class Round {
 public:
  Round(const Board& board, std::string_view topic, const Note& mine)
      : board_(board), mine_(mine), notes_(board.members.size) {
    for (int peer = 0; peer < board.members.size; ++peer) {
      if (peer != board.members.rank) Start(peer, TagOf(board, topic));
    }
    notes_[board.members.rank] = mine;
  }

  // Waits until all exchanges have ended; nothing touches the notes afterwards.
  absl::Status Wait() {
    absl::Status status;
    for (const auto& exchange : exchanges_) status.Update(exchange->Wait(Deadline::max()));
    return status;
  }

  const std::vector<Note>& notes() const { return notes_; }
  // By the transport's ranks: true if the rank's note has arrived.
  std::vector<bool> heard_from() const {
    std::vector<bool> heard(board_.transport.control->size());
    for (size_t member = 0; member < notes_.size(); ++member) {
      heard[board_.first + member] = notes_[member].is_here != 0;
    }
    return heard;
  }

 private:
  void Start(int peer, uint64_t tag) {
    DataPlane& plane = *board_.transport.data;
    std::vector<Bytes> send(plane.size());
    std::vector<MutableBytes> recv(plane.size());
    send[board_.first + peer] = {reinterpret_cast<const uint8_t*>(&mine_), sizeof(mine_)};
    recv[board_.first + peer] = {reinterpret_cast<uint8_t*>(&notes_[peer]), sizeof(Note)};
    exchanges_.push_back(plane.Start(tag, send, recv));
  }

  const Board& board_;
  const Note mine_;
  std::vector<Note> notes_;
  std::vector<std::unique_ptr<Exchange>> exchanges_;
};

constexpr std::chrono::milliseconds kPause(2);  // between two checks
constexpr std::chrono::milliseconds kMostPatience(250);

// Takes the frames that have arrived, up to the first failure, and returns that failure, else OK.
// Does not wait, since the plane has failed. Sets heard_from, by rank.
absl::Status FailureTold(ControlPlane& control, std::vector<bool>& heard_from) {
  for (;;) {
    const absl::StatusOr<ControlMessage> message = control.Receive();
    if (!message.ok()) return absl::OkStatus();
    heard_from[message->from] = true;
    const std::optional<ParsedFrame> parsed = ParseFrame(message->frame);
    if (parsed.has_value() && !parsed->failure.ok()) return parsed->failure;
  }
}

// `rank` could not do `what` because the ranks in `silent` (ascending) did not answer; if there are
// none, the network is at fault.
absl::Status LateError(int rank, const std::string& what, std::span<const int> silent) {
  const std::string late = absl::StrCat("rank ", rank, " could not ", what, " in time: ");
  if (silent.empty()) {
    return absl::DeadlineExceededError(absl::StrCat(
        late, "all ranks are there; look at the network between them, or raise the timeout"));
  }
  return absl::DeadlineExceededError(
      absl::StrCat(late, silent.size() == 1 ? "rank " : "ranks ", absl::StrJoin(silent, ", "),
                   " did not answer; look at what that process does, or raise the timeout"));
}

}  // namespace

absl::StatusOr<Answers> TellAll(const Board& board, std::string_view topic,
                                const absl::StatusOr<std::string>& mine) {
  Round round(board, topic, NoteOf(mine));
  absl::Status status;
  {
    const Alarm alarm(*board.transport.control, board.deadline);
    // Exchanges may use connections that the control plane does not watch.
    const Failure::Listener hears_of_lost_peers =
        board.transport.control->failure()->PassOn(board.transport.data->failure());
    status = round.Wait();
  }
  if (absl::IsDeadlineExceeded(status)) {
    const std::string what =
        absl::StrCat("tell all others its ", board.subject, " (", std::string(topic), ")");
    return FindSilentRanks(board, what, round.heard_from());
  }
  if (!status.ok()) return status;
  Answers answers;
  for (const Note& note : round.notes()) answers.push_back(AnswerIn(note));
  return answers;
}

absl::StatusOr<Deadline> EarliestDeadline(const Board& board) {
  using std::chrono::milliseconds;
  const auto left = std::chrono::duration_cast<milliseconds>(board.deadline - Clock::now());
  const absl::StatusOr<Answers> answers = TellAll(board, "time left", absl::StrCat(left.count()));
  if (!answers.ok()) return answers.status();
  int64_t least = left.count();
  for (const absl::StatusOr<std::string>& answer : *answers) {
    int64_t theirs = 0;
    if (answer.ok() && absl::SimpleAtoi(*answer, &theirs)) least = std::min(least, theirs);
  }
  return std::min(board.deadline, Clock::now() + milliseconds(least));
}

TellAddress TellerOf(const Board& board) {
  return
      [board](const absl::StatusOr<std::string>& mine) -> absl::StatusOr<std::vector<std::string>> {
        const absl::StatusOr<Answers> answers = TellAll(board, "address", mine);
        if (!answers.ok()) return answers.status();
        if (absl::Status refusal = FirstRefusal(board, *answers); !refusal.ok()) return refusal;
        std::vector<std::string> addresses;
        for (const absl::StatusOr<std::string>& answer : *answers) addresses.push_back(*answer);
        return addresses;
      };
}

absl::Status FirstRefusal(const Board& board, const Answers& answers) {
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    if (answers[rank].ok()) continue;
    return absl::UnimplementedError(absl::StrCat("rank ", board.first + rank,
                                                 " takes no part over ", board.subject, ": ",
                                                 answers[rank].status().message()));
  }
  return absl::OkStatus();
}

bool CanTell(const Board& board) {
  return board.transport.control->status().ok() && Clock::now() < board.deadline;
}

absl::Status TellOutcome(const Board& board, std::string_view topic, const absl::Status& mine) {
  if (!mine.ok() && !CanTell(board)) return mine;
  const absl::StatusOr<Answers> outcomes =
      TellAll(board, topic, mine.ok() ? absl::StatusOr<std::string>("") : mine);
  if (!outcomes.ok()) return outcomes.status();
  return FirstRefusal(board, *outcomes);
}

absl::Status TellWhy(ControlPlane& control, absl::Status reason) {
  const bool failed_before = !control.status().ok();
  control.Abort(reason);
  if (failed_before) {
    std::vector<bool> heard_from(control.size());
    if (absl::Status told = FailureTold(control, heard_from); !told.ok()) reason = told;
  }
  control.SendToAll(PackFailure(reason));
  control.Flush(Clock::now() + kMostPatience);
  return reason;
}

absl::Status GiveUp(Transport& transport, absl::Status reason) {
  reason = TellWhy(*transport.control, std::move(reason));
  transport.Reset();
  return reason;
}

absl::Status FindSilentRanks(const Board& board, const std::string& what,
                             std::vector<bool> is_awake) {
  ControlPlane& control = *board.transport.control;
  control.SendToAll(PackSignal(FrameType::kPong));
  is_awake.resize(control.size());
  is_awake[control.rank()] = true;
  const Deadline end = Clock::now() + std::min(board.timeout / 30, kMostPatience);
  for (;;) {
    const bool is_last = Clock::now() >= end;
    if (absl::Status told = FailureTold(control, is_awake); !told.ok()) return told;
    if (is_last || std::find(is_awake.begin(), is_awake.end(), false) == is_awake.end()) break;
    std::this_thread::sleep_for(kPause);
  }
  std::vector<int> silent;
  for (int rank = 0; rank < control.size(); ++rank) {
    if (!is_awake[rank]) silent.push_back(rank);
  }
  return LateError(control.rank(), what, silent);
}

}  // namespace thinwire
