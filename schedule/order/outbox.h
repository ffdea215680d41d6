// Outbox: what a sequencer wants done, in order. Slots are used again, so that a steady state
// allocates nothing. Not thread-safe.
#ifndef THINWIRE_SCHEDULE_ORDER_OUTBOX_H_
#define THINWIRE_SCHEDULE_ORDER_OUTBOX_H_

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "schedule/order/frames.h"

namespace thinwire {

// A chunk that is to be run now.
struct StartChunk {
  uint64_t id = 0;  // of its tensor
  uint32_t chunk = 0;
  bool drain = true;  // all of its hops come before the next chunk's; Matching::kByOrder only
  bool predicted = false;
  uint64_t position = 0;                 // in the predicted queue; 0: it was not there
  double started_s = 0.0;                // of the sequencer's clock
  std::shared_ptr<void> host = nullptr;  // what the host gave to OnSubmit with the tensor
};

inline constexpr int kEveryone = -1;  // every other rank

struct Action {
  enum class Kind { kStart, kSend, kFail, kPredicted } kind = Kind::kStart;
  StartChunk start;      // kStart
  int to = kEveryone;    // kSend
  OrderMessage message;  // kSend
  absl::Status reason;   // kFail
  int silent = 0;        // kFail: ranks that do not answer, and so will not echo it
  int at_once = 0;       // kPredicted: predicted chunks that may soon be under way together
};

class Outbox {
 public:
  void Start(StartChunk start) { Add(Action::Kind::kStart).start = std::move(start); }

  // The message, for its content to be filled in.
  OrderMessage& Send(int to, FrameType type) {
    Action& action = Add(Action::Kind::kSend);
    action.to = to;
    action.message.type = type;
    action.message.announcements.clear();
    action.message.predicted.clear();
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

#endif  // THINWIRE_SCHEDULE_ORDER_OUTBOX_H_
