// StoreServer: one server of the store as pure logic: messages in, messages out, and the time as an
// argument. serve.h hosts it on a MessagePlane.
//
// For each slice it keeps the values, the optimizer's slots, a Ledger and a DeltaStream. A push is
// kept encoded until the ledger lets it be applied; then the update's pushes are decoded in rank
// order. For a row-sparse value a push has some rows, and a pull asks for some (rows.h).
//
// Rounds. With a quorum (ledger.h) the grace of a slice's round begins when the round has its
// quorum. Its end is an input like a message: EndedGraces returns it when it is due.
//
// Failure. A lost worker in sync, and in every mode a disagreement between workers or a malformed
// message, fails the store: every worker gets the first reason, and nothing else is answered from
// then on. In the other modes the others go on without a lost worker; with a quorum, as long as at
// least that many are left.
//
// Joining. In all modes but sync a worker may join at any time, under the number of one that has
// gone or under a new one (kEnter). Its calls (Together) that the others have already completed are
// answered at once, so it sets up as at the start; calls that are under way complete without it.
// Its first pull gets the anchor (delta_stream.h). If it is set up differently, only this worker is
// refused. In sync a late worker is refused.
//
// Coming back. The state is a function of the messages, losses and ends of graces in the order in
// which OnMessage, OnLost and Apply got them; the time can only fail a store. So if the host has
// recorded these inputs, the same calls in a new process (Apply), or a snapshot and the later
// calls, restore the state bit by bit. Workers then send again what was not answered, and no input
// is applied twice.
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

// Body of kInit, as text with one item per line: the mode, the codec, the layout's hash, and then
// the server's slices as "number offset count width key". All workers must send the same.
struct StoreTable {
  struct Entry {
    uint32_t slice = 0;
    size_t offset = 0, count = 0;
    size_t width = 0;  // as in StoreKey
    std::string key;
  };
  StoreMode mode;
  CodecPair codec;
  uint64_t layout_hash = 0;
  std::vector<Entry> slices;

  std::string ToString() const;
  static absl::StatusOr<StoreTable> Parse(std::string_view text);
};

// An action of a server on a slice, for checks of the age of gradients.
struct StoreTrace {
  enum class Kind {
    kPulled,   // the values of `version` were sent to the worker
    kApplied,  // a push of the worker was applied, in the update from `version` to the next
  };
  Kind kind = Kind::kPulled;
  uint32_t slice = 0;
  int worker = 0;
  uint64_t version = 0;
  uint64_t workers = 0;  // Ledger::workers
};

// One input of a server, or a part of a server's snapshot.
struct StoreRecord {
  enum class Kind : uint32_t {
    kMessage,  // worker, detail: priority; head, body: as OnMessage got them
    kLost,     // worker, detail: absl::StatusCode; head: the reason
    kServer,   // head: the state that all slices share
    kSlice,    // detail: its number; body: its values, slots, ledger and stream
    kRun,      // head: the run that a file of records belongs to; not for Apply
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
  // Sends to a worker; must not wait. A worker that is gone is no error.
  using Send = std::function<void(int worker, int priority, const StoreHead& head,
                                  std::vector<uint8_t> body)>;
  struct Options {
    int server = 0;  // its number, for error messages
    int workers = 1, servers = 1;
    // The longest time that a push, a pull or a call of all workers may wait for missing workers.
    std::chrono::milliseconds timeout{60000};
    // The host records inputs before it passes them: a push without a pull is answered by kStored,
    // and the answer to init tells workers to send unanswered messages again when this server comes
    // back.
    bool has_journal = false;
    // Called for every StoreTrace, unless null.
    std::function<void(const StoreTrace&)> trace = nullptr;
  };

  StoreServer(const Options& options, const Backend& backend, Send send);

  void OnMessage(int worker, int priority, std::string_view head, std::vector<uint8_t> body,
                 Deadline now);
  // `reason`: Cancelled if the worker has closed its store.
  void OnLost(int worker, const absl::Status& reason, Deadline now);
  // Fails the store if something has waited longer than the timeout. Call a few times a second.
  void OnClock(Deadline now);
  // The rounds whose grace is over (each once), as inputs to record and pass to Apply at once.
  std::vector<StoreRecord> EndedGraces(Deadline now);
  // The end of the next grace.
  Deadline next_grace() const { return graces_.empty() ? Deadline::max() : graces_.front().end; }
  // Fails the store, unless it has failed before.
  void Fail(absl::Status reason);

  // Applies a recorded input (also those of OnMessage and OnLost) or a part of a snapshot; the
  // parts must come first, in their order. DataLoss for a record that can't be read.
  absl::Status Apply(StoreRecord record, Deadline now);
  // Passes to `take` the records that bring a new server with the same options to this state. Call
  // between two inputs. Stops at the first error of `take`, and returns it.
  absl::Status Snapshot(const std::function<absl::Status(const StoreRecord&)>& take) const;

  const absl::Status& failure() const { return failure_; }
  // The workers that have neither left nor been lost.
  std::vector<int> AwaitedWorkers() const;
  // True if no worker is left and none may come back: the last one has closed its store, the mode
  // lets no worker join, or the store has failed.
  bool is_deserted() const {
    return workers_left_ == 0 && (last_has_closed_ || !may_be_joined() || !failure_.ok());
  }

 private:
  struct Member {
    absl::Status lost;                               // OK: it is here, or expected from the start
    bool joined = false;                             // after the store was set up
    std::array<uint64_t, kTogetherKinds> excused{};  // by Together: calls to it go without this one
  };
  struct Slice {
    std::string key;
    size_t offset = 0;
    size_t width = 0;  // as in StoreKey
    CodecPair codec;
    std::vector<float> x;
    std::vector<std::vector<float>> slots;
    uint64_t steps = 0;      // updates by the optimizer
    uint64_t published = 0;  // version of the last publication
    Ledger ledger;
    DeltaStream stream;
    struct Waiting {
      Ledger::Step::Push push;
      std::vector<uint8_t> wire;
    };
    std::vector<Waiting> pushes;  // not applied yet
    std::optional<Deadline> waits_since;
    std::optional<uint64_t> grace_of;  // the version whose round's grace runs

    Slice(StoreMode mode, int workers, const CodecSpec& down, uint64_t draws,
          const Backend& backend)
        : ledger(mode, workers), stream(down, draws, backend) {}
  };
  struct Request {
    int priority = 0;
    uint64_t have = 0;
    std::vector<uint8_t> rows;  // the rows of a row-sparse value
  };
  struct Grace {
    Deadline end;
    uint32_t slice = 0;
    uint64_t version = 0;
  };
  // A call that some workers have made and others have not made yet.
  struct Call {
    std::map<int, std::vector<uint8_t>> bodies;  // by worker
    Deadline since;
  };
  // Work to hand out, and the workers that wait for some.
  struct Share {
    struct Ask {
      int priority = 0;
      uint64_t number = 0, applied = 0, request = 0;
    };
    explicit Share(const WorkPlan& plan) : queue(plan) {}

    WorkQueue queue;
    std::map<int, Ask> asks;  // by worker
  };
  // The last completed call of a kind.
  struct Completed {
    uint64_t number = 0;
    std::vector<uint8_t> refusal;
  };

  bool may_be_joined() const { return is_set_up_ && mode_.goes_on_without(); }
  bool is_here(int worker) const { return members_[static_cast<size_t>(worker)].lost.ok(); }
  void OnEnter(int worker);
  void OnLeave(int worker, int priority, const StoreHead& head, Deadline now);
  void Join(int worker);
  // Sends the reason to this worker only, and treats it as lost.
  void Refuse(int worker, const absl::Status& reason, Deadline now);
  uint64_t LastCall(uint32_t what) const;
  // Checks a joined worker's call that the others have completed; an error says why it can't join.
  absl::Status CheckJoiner(Together what, uint64_t number, std::string_view body) const;
  absl::Status Handle(int worker, int priority, const StoreHead& head, std::vector<uint8_t> body,
                      Deadline now);
  absl::Status OnPush(int worker, const StoreHead& head, std::vector<uint8_t> body, Slice& slice);
  void OnPull(int worker, int priority, const StoreHead& head, std::vector<uint8_t> rows,
              Slice& slice);
  void OnTake(int worker, int priority, const StoreHead& head, std::string_view body);
  // Hands out work to the workers that wait.
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
  // Removes the weights from an update's wires_, and sets factors_. Returns the sum's factor.
  float TakeFactors();
  // Sets sum_ to the sum of the pushes times their factors.
  void SumOf(const Slice& slice, const std::vector<Ledger::Step::Push>& pushes);
  void Answer(uint32_t number, Slice& slice, const Ledger::Step& step);
  // Fails the store if something waits for a worker that is gone.
  void CheckWaits(const Slice& slice);
  std::vector<int> MissingOf(uint32_t what, uint64_t number, const Call& call) const;
  bool HasWaiting(int worker) const;  // has pushes that are held
  StoreRecord ServerRecord() const;
  absl::Status SnapshotWaiting(const std::function<absl::Status(const StoreRecord&)>& take) const;
  bool RestoreServer(std::string_view bytes);
  bool RestoreSlice(uint32_t number, Bytes bytes);
  Slice& AddSlice(uint32_t number, size_t width, const CodecPair& codec);
  void Tell(int worker, const absl::Status& error) const;
  std::string NamesOf(const std::vector<int>& workers) const;

  static constexpr int kLast = std::numeric_limits<int>::min();  // the lowest priority

  const Options options_;
  const Backend& backend_;
  const Send send_;
  absl::Status failure_;
  std::vector<Member> members_;  // by worker
  int workers_left_;
  bool last_has_closed_ = false;

  bool is_set_up_ = false;          // the first init is complete
  std::vector<std::string> inits_;  // bodies of the completed inits
  StoreMode mode_;
  OptimizerSpec optimizer_;
  std::string optimizer_text_ = "sum";  // that optimizer_ was parsed from
  std::map<uint32_t, Slice> slices_;
  absl::flat_hash_map<std::pair<int, uint64_t>, Request> requests_;  // by worker and request
  std::map<uint32_t, std::vector<uint8_t>> puts_;
  std::map<std::pair<uint32_t, uint64_t>, Call> calls_;  // by Together and number
  std::map<uint32_t, Completed> completed_;              // by Together
  std::map<uint32_t, Share> shares_;
  std::deque<Grace> graces_;  // running ones, in the order of their ends
  // Scratch of an update: its pushes in rank order, and the slice's optimizer arrays.
  std::vector<std::vector<uint8_t>> wires_;
  std::vector<float*> slots_;
  std::vector<float> sum_;      // of an update; also scratch of a publication
  std::vector<float> factors_;  // of the pushes, with a quorum
  std::vector<float> decoded_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_SERVER_H_
