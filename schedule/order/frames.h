// Frames: the messages between ranks on the control plane. Wire structs have a fixed width and are
// copied into control frames unchanged (little-endian hosts); the version of compress/FORMAT.md
// covers them. Outbox: the messages of a sequencer to its peers, and its actions for its host.
#ifndef THINWIRE_SCHEDULE_ORDER_FRAMES_H_
#define THINWIRE_SCHEDULE_ORDER_FRAMES_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "schedule/hash.h"
#include "transport/planes.h"

namespace thinwire {

// Ends an error about a message that no rank of this version sends.
inline constexpr char kSameVersion[] = "; use the same version of thinwire on every rank";

enum class FrameType : uint32_t {
  kReport = 1,       // rank to leader: this tensor is ready here
  kAnnounce = 2,     // leader to all: start these chunks, in this order
  kOverdue = 3,      // rank to leader: this tensor has passed its deadline here (carries a Report)
  kFail = 4,         // any rank to all: the group has failed, and this is the reason
  kBye = 5,          // any rank to all: this rank has finished, and closes once all have (carries
                     // the number of collectives that it has started)
  kPredict = 6,      // leader to all: start these chunks, in this order, once you have them
  kPing = 7,         // rank to rank: answer with a pong
  kPong = 8,         // rank to rank: the answer to a ping
  kGroupReport = 9,  // group head to leader: this tensor is ready on all ranks of the group
  // 10 was a digest, which earlier releases of the protocol sent.
  kByeHeard = 11,  // rank to rank: all that your goodbye counts is done here
  kWithdraw = 12,  // leader to all: these tensors are predicted no more; their chunks will be
                   // announced if the tensors come
};

// A value of Report::op besides those of Op: a mean by the call's divisor, which partition_hash
// then covers.
inline constexpr uint8_t kDividedByCaller = 2;

// Report::key of a use without a name, which ranks match by order.
inline constexpr uint64_t kUnnamedKey = HashBytes({});

// One tensor as one rank sees it. All ranks' reports of one id must agree.
struct Report {
  uint64_t key = 0;   // hash of the name
  uint64_t call = 0;  // number of earlier uses of that name
  uint64_t numel = 0;
  uint64_t partition_hash = 0;
  int32_t priority = 0;
  uint8_t dtype = 0;
  uint8_t op = 0;
  uint8_t direct = 0;      // exchanged at once, outside the leader's order
  uint8_t collective = 0;  // Collective of schedule/request.h
  uint32_t chunks = 0;
  // For error messages, cut to fit: the tensor's name, a NUL, its shape if shapes are compared, and
  // NULs. partition_hash covers the shape.
  char name[68] = {};

  uint64_t id() const { return HashCombine(key, call); }
};
static_assert(sizeof(Report) == 112 && std::is_trivially_copyable_v<Report>);

// Such as "1024 elements of fp32 in the shape 32x32, mean".
std::string DescribeReport(const Report& report);
// FailedPrecondition if `rank` describes the tensor differently from `first_rank`.
absl::Status CheckAgreement(int first_rank, const Report& first, int rank, const Report& report);

// Average bytes of fp32 input of the tensor's chunks.
size_t ChunkBytes(const Report& report);

struct Announcement {
  uint64_t id = 0;
  uint32_t chunk = 0;
  // Non-zero: nothing is known to follow, so all hops of this chunk come before the next chunk's.
  uint32_t drain = 0;
  friend bool operator==(const Announcement&, const Announcement&) = default;
};
static_assert(sizeof(Announcement) == 16 && std::is_trivially_copyable_v<Announcement>);

struct PredictedChunk {
  uint64_t id = 0;
  uint32_t chunk = 0;
  uint32_t window_kib = 0;  // of StartQueue, in fp32 input
  uint64_t partition_hash = 0;
  friend bool operator==(const PredictedChunk&, const PredictedChunk&) = default;
};
static_assert(sizeof(PredictedChunk) == 24 && std::is_trivially_copyable_v<PredictedChunk>);

// A tensor that was predicted with `chunks` chunks, and is predicted no more.
struct Withdrawal {
  uint64_t id = 0;
  uint32_t chunks = 0;
  uint32_t unused = 0;
  friend bool operator==(const Withdrawal&, const Withdrawal&) = default;
};
static_assert(sizeof(Withdrawal) == 16 && std::is_trivially_copyable_v<Withdrawal>);

void SetName(std::string_view name, std::string_view shape, Report* report);
std::string_view ShapeOf(const Report& report);

// A message between sequencers. `type` says which of the members it carries.
struct OrderMessage {
  FrameType type = FrameType::kPing;
  Report report;                            // kReport, kOverdue, kGroupReport
  std::vector<Announcement> announcements;  // kAnnounce
  std::vector<PredictedChunk> predicted;    // kPredict
  std::vector<Withdrawal> withdrawn;        // kWithdraw
};

// Packs the code, the number of ranks known not to answer, and as much of the message as fits.
ControlFrame PackFailure(const absl::Status& reason, int silent = 0);
ControlFrame PackBye(uint64_t started);
ControlFrame PackSignal(FrameType type);  // kPing, kPong, kByeHeard

// The content of a frame.
struct ParsedFrame {
  OrderMessage message;
  absl::Status failure;  // kFail
  int silent = 0;        // kFail
  uint64_t started = 0;  // kBye
};
// Returns nullopt for a frame that no rank of this version sends.
std::optional<ParsedFrame> ParseFrame(const ControlFrame& frame);

// The number of entries of the message's list that fit in a frame, and the frame that begins with
// entry `first`.
size_t EntriesPerFrame(const OrderMessage& message);
ControlFrame PackPart(const OrderMessage& message, size_t first);

// The number of frames that the message takes; a long list takes several.
inline size_t FramesOf(const OrderMessage& message) {
  const size_t entries =
      std::max({message.announcements.size(), message.predicted.size(), message.withdrawn.size()});
  const size_t each = EntriesPerFrame(message);
  return std::max<size_t>(1, (entries + each - 1) / each);
}

// Calls send(frame) for each frame of the message.
template <typename Send>
void ForEachFrame(const OrderMessage& message, Send send) {
  const size_t frames = FramesOf(message);
  for (size_t i = 0; i < frames; ++i) send(PackPart(message, i * EntriesPerFrame(message)));
}

// A chunk to start now.
struct StartChunk {
  uint64_t id = 0;  // of its tensor
  uint32_t chunk = 0;
  bool drain = true;  // all of its hops come before the next chunk's; Matching::kByOrder only
  bool predicted = false;
  uint64_t position = 0;                 // in StartQueue's predicted chunks; 0: not among them
  double started_s = 0.0;                // seconds of the sequencer's clock
  std::shared_ptr<void> host = nullptr;  // what the host gave to OnSubmit with the tensor
};

inline constexpr int kEveryone = -1;  // every other rank

struct Action {
  enum class Kind { kStart, kSend, kFail, kPredicted } kind = Kind::kStart;
  StartChunk start;      // kStart
  int to = kEveryone;    // kSend
  OrderMessage message;  // kSend
  absl::Status reason;   // kFail
  int silent = 0;        // kFail: number of ranks that do not answer, and so will not echo it
  int at_once = 0;       // kPredicted: predicted chunks that may soon be under way together
};

// Actions of a sequencer, to be done in order. Slots are reused, so that a steady state allocates
// nothing. Not thread-safe.
class Outbox {
 public:
  void Start(StartChunk start) { Add(Action::Kind::kStart).start = std::move(start); }

  // Returns the message; the caller fills in its content.
  OrderMessage& Send(int to, FrameType type) {
    Action& action = Add(Action::Kind::kSend);
    action.to = to;
    action.message.type = type;
    action.message.announcements.clear();
    action.message.predicted.clear();
    action.message.withdrawn.clear();
    return action.message;
  }

  void Fail(absl::Status reason, int silent) {
    Action& action = Add(Action::Kind::kFail);
    action.reason = std::move(reason);
    action.silent = silent;
  }

  void Predicted(int at_once) { Add(Action::Kind::kPredicted).at_once = at_once; }

  bool empty() const { return count_ == 0; }
  std::span<const Action> actions() const { return {slots_.data(), count_}; }
  void Clear() {
    for (size_t i = 0; i < count_; ++i) slots_[i].start.host.reset();
    count_ = 0;
  }

 private:
  Action& Add(Action::Kind kind) {
    if (count_ == slots_.size()) slots_.emplace_back();
    Action& action = slots_[count_++];
    action.kind = kind;
    return action;
  }

  std::vector<Action> slots_;
  size_t count_ = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_FRAMES_H_
