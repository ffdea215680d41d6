// StoreServer: one server of the store as pure logic: messages in, messages out, with a clock given
// to it. serve.h hosts it on a MessagePlane.
//
// For each slice it keeps the values, the optimizer's slots, a Ledger and a DeltaStream. A push is
// kept encoded until the ledger says that it is applied; then the update is decoded in rank order.
// A push of a row-sparse value brings some rows, and a pull asks for some (rows.h).
//
// Rounds. With a quorum (ledger.h) the grace of a slice's round begins when its quorum is there.
// Its end is an input as messages are: EndedGraces says when to give it.
//
// Failure. In sync a worker that is lost, and in every mode a disagreement of the workers or a
// malformed message of one, fails the store: every worker is told the first reason, and nothing
// else is answered from then on. In the other modes the others go on without a lost worker; with a
// quorum, as long as so many are left.
//
// Joining. In all modes but sync a worker may come at any time, under the number of one that has
// gone or under a new one (kEnter). Its calls of all workers that the others have made before are
// answered at once, so it sets up as a worker does at the start; those that are being made go
// without it. Its first pull gets the anchor (delta_stream.h). If it is set up differently, it
// alone is refused. In sync a worker that comes late is told that it can't.
//
// Coming back. The state is a function of the messages, losses and ends of graces in the order in
// which OnMessage, OnLost and Apply got them; clocks only end a store. So a server whose host has
// recorded them is brought back to the bit by the same calls in a new process (Apply), or by a
// snapshot and those after it. Workers then send again what was not answered, and what is there
// already is not applied twice.
#ifndef THINWIRE_SCHEDULE_STORE_SERVER_H_
#define THINWIRE_SCHEDULE_STORE_SERVER_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/backend.h"
#include "compress/codec_spec.h"
#include "schedule/store/delta_stream.h"
#include "schedule/store/frames.h"
#include "schedule/store/ledger.h"
#include "schedule/store/optimizer.h"
#include "schedule/store/work_queue.h"
#include "transport/store.h"

namespace thinwire {

// Body of kInit, which is text, one item a line: the mode, the codec, the layout's hash, and then
// the server's slices as "number offset count width key". All workers send the same.
struct StoreTable {
  struct Entry {
    uint32_t slice = 0;
    size_t offset = 0, count = 0;
    size_t width = 0;  // as StoreKey's
    std::string key;
  };
  StoreMode mode;
  CodecPair codec;
  uint64_t layout_hash = 0;
  std::vector<Entry> slices;

  std::string ToString() const;
  static absl::StatusOr<StoreTable> Parse(std::string_view text);
};

// Something that a server has done to a slice, for whoever checks the age of gradients.
struct StoreTrace {
  enum class Kind {
    kPulled,   // the values of `version` are sent to the worker
    kApplied,  // a push of the worker is applied, in an update of `version` that makes the next one
  };
  Kind kind = Kind::kPulled;
  uint32_t slice = 0;
  int worker = 0;
  uint64_t version = 0;
  uint64_t workers = 0;  // Ledger::workers
};

// One input of a server, or a part of a snapshot of one.
struct StoreRecord {
  enum class Kind : uint32_t {
    kMessage,  // worker, detail: priority; head, body: as OnMessage got them
    kLost,     // worker, detail: absl::StatusCode; head: the reason
    kServer,   // head: what all slices share
    kSlice,    // detail: its number; body: its values, slots, numbers and stream
    kRun,      // head: the run that a file of records is of. No server takes it.
    kGrace,    // detail: a slice's number; the grace of its round is over
  };
  Kind kind = Kind::kMessage;
  int worker = 0;
  int detail = 0;
  std::string head;
  std::vector<uint8_t> body;
};

class StoreServer {
 public:
  // Sends to a worker; never waits. A worker that is gone is no error.
  using Send = std::function<void(int worker, int priority, const StoreHead& head,
                                  std::vector<uint8_t> body)>;
  struct Options {
    int server = 0;  // its number, for messages
    int workers = 1, servers = 1;
    // The time that a push, a pull or a call of all workers may wait for the missing ones.
    std::chrono::milliseconds timeout{60000};
    // Inputs are recorded before they come here: a push without a pull is answered by kStored, and
    // an init tells workers to send unanswered messages again when this server comes back.
    bool has_journal = false;
    // Is told what happens to slices, where it is not null.
    std::function<void(const StoreTrace&)> trace = nullptr;
  };

  StoreServer(const Options& options, const Backend& backend, Send send);

  void OnMessage(int worker, int priority, std::string_view head, std::vector<uint8_t> body,
                 Deadline now);
  // `reason`: Cancelled if the worker has closed its store.
  void OnLost(int worker, const absl::Status& reason, Deadline now);
  // Fails the store when something waits longer than the timeout. To be called a few times a
  // second.
  void OnClock(Deadline now);
  // The rounds whose grace is over, as inputs to be recorded and given to Apply at once; each is
  // returned once.
  std::vector<StoreRecord> EndedGraces(Deadline now);
  // When one is over next.
  Deadline next_grace() const { return graces_.empty() ? Deadline::max() : graces_.front().end; }
  // The first failure stays.
  void Fail(absl::Status reason);

  // Takes an input, that of OnMessage or OnLost too, or a part of a snapshot; parts come first, in
  // their order. DataLoss for a part that can't be read.
  absl::Status Apply(StoreRecord record, Deadline now);
  // Records that bring a new server of the same options to this state, between two inputs. Stops at
  // the first error of `take`, and returns it.
  absl::Status Snapshot(const std::function<absl::Status(const StoreRecord&)>& take) const;

  const absl::Status& failure() const { return failure_; }
  // The workers that have not left and were not lost.
  std::vector<int> AwaitedWorkers() const;
  // No worker is left, and none may come back: the last one has closed its store, or the mode lets
  // nobody join.
  bool is_deserted() const {
    return workers_left_ == 0 && (last_has_closed_ || !may_be_joined() || !failure_.ok());
  }

 private:
  struct Member {
    absl::Status lost;                               // OK: it is here, or has not come yet
    bool joined = false;                             // when the store was set up
    std::array<uint64_t, kTogetherKinds> excused{};  // by Together: calls to it go without this one
  };
  struct Slice {
    std::string key;
    size_t offset = 0;
    size_t width = 0;  // as StoreKey's
    CodecPair codec;
    std::vector<float> x;
    std::vector<std::vector<float>> slots;
    uint64_t steps = 0;      // of the optimizer
    uint64_t published = 0;  // version of the last publication
    Ledger ledger;
    DeltaStream stream;
    struct Waiting {
      Ledger::Step::Push push;
      std::vector<uint8_t> wire;
    };
    std::vector<Waiting> pushes;  // that are not applied
    std::optional<Deadline> waits_since;
    std::optional<uint64_t> grace_of;  // the version whose next update has a grace that runs

    Slice(StoreMode mode, int workers, const CodecSpec& down, uint64_t draws,
          const Backend& backend)
        : ledger(mode, workers), stream(down, draws, backend) {}
  };
  struct Request {
    int priority = 0;
    uint64_t have = 0;
    std::vector<uint8_t> rows;  // of a row-sparse value
  };
  struct Grace {
    Deadline end;
    uint32_t slice = 0;
    uint64_t version = 0;
  };
  // A call that some workers have made and others have not.
  struct Call {
    std::map<int, std::vector<uint8_t>> bodies;  // by worker
    Deadline since;
  };
  // Work that is handed out, and the workers that wait for some.
  struct Share {
    struct Ask {
      int priority = 0;
      uint64_t number = 0, applied = 0, request = 0;
    };
    explicit Share(const WorkPlan& plan) : queue(plan) {}

    WorkQueue queue;
    std::map<int, Ask> asks;  // by worker
  };
  // The last call of a kind that was completed.
  struct Completed {
    uint64_t number = 0;
    std::vector<uint8_t> refusal;
  };

  bool may_be_joined() const { return is_set_up_ && mode_.goes_on_without(); }
  bool is_here(int worker) const { return members_[static_cast<size_t>(worker)].lost.ok(); }
  void OnEnter(int worker);
  void OnLeave(int worker, int priority, const StoreHead& head, Deadline now);
  void Join(int worker);
  // Only this worker is told, and lost.
  void Refuse(int worker, const absl::Status& reason, Deadline now);
  uint64_t LastCall(uint32_t what) const;
  // Why a worker that has joined can't make a call that the others have made; or OK.
  absl::Status CheckJoiner(Together what, uint64_t number, std::string_view body) const;
  absl::Status Handle(int worker, int priority, const StoreHead& head, std::vector<uint8_t> body,
                      Deadline now);
  absl::Status OnPush(int worker, const StoreHead& head, std::vector<uint8_t> body, Slice& slice);
  void OnPull(int worker, int priority, const StoreHead& head, std::vector<uint8_t> rows,
              Slice& slice);
  void OnTake(int worker, int priority, const StoreHead& head, std::string_view body);
  // Hands out to those that wait.
  void HandOut();
  void SendWork(int worker, int priority, uint64_t request, const WorkRange& range,
                std::string_view text) const;
  absl::Status OnCall(int worker, const StoreHead& head, std::vector<uint8_t> body, Deadline now);
  absl::Status TryCalls();
  void AnswerCall(int worker, uint32_t what, uint64_t number, std::vector<uint8_t> refusal);
  std::vector<uint8_t> RefusalOf(Together what, const Call& call) const;
  absl::Status Complete(Together what, const Call& call);
  absl::Status Init(const Call& call);
  absl::Status SetOptimizer(std::string_view body);
  void Load();
  std::vector<uint8_t> StateOf(const Slice& slice) const;
  absl::Status CheckState(const Slice& slice, const std::vector<uint8_t>& state) const;
  void Drain(uint32_t number, Slice& slice, Deadline now);
  void EndGrace(uint32_t number, Deadline now);
  void Update(uint32_t number, Slice& slice, const std::vector<Ledger::Step::Push>& pushes);
  // Takes the weights off an update's pushes, which are in wires_, and sets factors_. Returns what
  // their sum is multiplied by.
  float TakeFactors();
  // Sets sum_, of the pushes times their factors.
  void SumOf(const Slice& slice, const std::vector<Ledger::Step::Push>& pushes);
  void Answer(uint32_t number, Slice& slice, const Ledger::Step& step);
  // Fails the store where something waits for a worker that is not here any more.
  void CheckWaits(const Slice& slice);
  std::vector<int> MissingOf(uint32_t what, uint64_t number, const Call& call) const;
  bool HasWaiting(int worker) const;  // a push of it is held
  StoreRecord ServerRecord() const;
  absl::Status SnapshotWaiting(const std::function<absl::Status(const StoreRecord&)>& take) const;
  bool RestoreServer(std::string_view bytes);
  bool RestoreSlice(uint32_t number, Bytes bytes);
  Slice& AddSlice(uint32_t number, size_t width, const CodecPair& codec);
  void Tell(int worker, const absl::Status& error) const;
  std::string NamesOf(const std::vector<int>& workers) const;

  static constexpr int kLast = std::numeric_limits<int>::min();  // priority of what follows all

  const Options options_;
  const Backend& backend_;
  const Send send_;
  absl::Status failure_;
  std::vector<Member> members_;  // by number
  int workers_left_;
  bool last_has_closed_ = false;

  bool is_set_up_ = false;          // the first init is done
  std::vector<std::string> inits_;  // bodies of those that are done
  StoreMode mode_;
  OptimizerSpec optimizer_;
  std::string optimizer_text_ = "sum";  // of which it was parsed
  std::map<uint32_t, Slice> slices_;
  absl::flat_hash_map<std::pair<int, uint64_t>, Request> requests_;  // by worker and request
  std::map<uint32_t, std::vector<uint8_t>> puts_;
  std::map<std::pair<uint32_t, uint64_t>, Call> calls_;  // by Together and number
  std::map<uint32_t, Completed> completed_;              // by Together
  std::map<uint32_t, Share> shares_;
  std::deque<Grace> graces_;  // that run, in the order of their ends
  // An update uses these: its pushes in rank order, and the slice's arrays of the optimizer.
  std::vector<std::vector<uint8_t>> wires_;
  std::vector<float*> slots_;
  std::vector<float> sum_;      // of an update; and room for a publication
  std::vector<float> factors_;  // of its pushes, with a quorum
  std::vector<float> decoded_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_SERVER_H_
