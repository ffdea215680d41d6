// StoreWorker: one worker of the store, on a MessagePlane that calls the servers.
//
// A receiver thread writes pulled values to the caller's memory, so the memory of a pull belongs to
// the store until Wait has returned. Gradients are encoded, with the worker's residual, on the
// caller's thread; their memory may be reused when a push returns.
//
// The first failure is sticky: every later call returns it. It is the error that a server sent,
// Unavailable for a lost server, or DeadlineExceeded after the timeout.
//
// A server with a journal may come back. The worker keeps its messages to such a server until they
// are answered, and sends the unanswered ones again, in order, when the server is back. Calls wait
// in the meantime, and no message is lost or applied twice. The store fails with Unavailable if the
// server is away for longer than the timeout.
#ifndef THINWIRE_SCHEDULE_STORE_HOST_WORKER_H_
#define THINWIRE_SCHEDULE_STORE_HOST_WORKER_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "compress/backend.h"
#include "compress/codec_spec.h"
#include "compress/error_feedback.h"
#include "compress/types.h"
#include "schedule/store/delta_stream.h"
#include "schedule/store/frames.h"
#include "schedule/store/layout.h"
#include "schedule/store/ledger.h"
#include "schedule/store/rows.h"
#include "schedule/store/work_queue.h"
#include "schedule/store_host/resender.h"
#include "transport/messages/message_plane.h"
#include "transport/steady_cond_var.h"
#include "transport/store.h"

namespace thinwire {

// Use a key from one thread at a time. Call Init, SetCodec, SetOptimizer, Barrier, Save, Load and
// Close while no other call is in progress. Everything else is thread-safe.
class StoreWorker {
 public:
  struct Options {
    int workers = 1;
    StoreMode mode;
    CodecPair codec;  // of keys that are added before SetCodec
    StoreLayout::Options layout;
    std::chrono::milliseconds timeout{60000};
    // A push or pull waits while more than this many bytes are still queued for sending, so that a
    // worker that pushes faster than its link sends does not fill its memory.
    size_t max_queued = size_t{256} << 20;
  };
  // In sync a push of a key waits while this many earlier pushes of this worker are not applied,
  // since servers keep a push until every worker has pushed as often.
  static constexpr uint64_t kMostAhead = 8;
  struct Value {
    std::string key;
    TensorView values;
    size_t width = 0;  // elements per row of a row-sparse value; 0: dense
  };

  // The worker's number follows from the plane's rank (serve.h). Waits until all servers are
  // connected; DeadlineExceeded names those that are not. InvalidArgument for a codec that a store
  // does not support, a quorum above the number of workers, or a grace not below the timeout.
  //
  // In all modes but sync a worker may join a store that others have set up. Until its first push,
  // collective calls that the others have already made do not wait for them: Init uses the store's
  // values, SetOptimizer keeps the store's parameters, Barrier and Load do nothing.
  // FailedPrecondition in sync, or, from these calls, if the store is set up differently.
  static absl::StatusOr<std::unique_ptr<StoreWorker>> Create(std::unique_ptr<MessagePlane> plane,
                                                             const Options& options);
  ~StoreWorker();

  int rank() const { return rank_; }               // the worker's number
  bool has_joined() const { return has_joined_; }  // the store was set up before this worker came
  const Options& options() const { return options_; }

  // Sets the codec of keys that are added later; must be the same on all workers.
  absl::Status SetCodec(const CodecPair& codec);
  // Adds keys with worker 0's exact values. All workers must call it with the same keys and sizes
  // in the same order; it returns when all have.
  absl::Status Init(std::span<const Value> values);

  // A higher priority is sent first. A push or pull waits for the last pull of its key. With a
  // quorum (schedule/store/ledger.h) an update is the mean of its pushes, weighted by `weight`, a
  // positive number such as the samples of a gradient. InvalidArgument in other modes unless it
  // is 1.
  absl::Status Push(std::string_view key, TensorView gradient, int priority, double weight = 1.0);
  absl::Status Pull(std::string_view key, TensorView out, int priority);
  absl::Status PushPull(std::string_view key, TensorView gradient, TensorView out, int priority,
                        double weight = 1.0);
  // The same for rows of a row-sparse key, in any order: row i of `values` or `out` is row rows[i]
  // of the key. Rows pushed twice are summed; a row pulled twice is written twice. Pushes of no
  // rows count as pushes.
  absl::Status PushRows(std::string_view key, std::span<const int64_t> rows, TensorView values,
                        int priority, double weight = 1.0);
  absl::Status PullRows(std::string_view key, std::span<const int64_t> rows, TensorView out,
                        int priority);
  struct Rows {
    std::span<const int64_t> ids;
    TensorView values;  // for a pull: the output
  };
  // Pushes and pulls with one message per slice; the two lists of rows may differ.
  absl::Status PushPullRows(std::string_view key, const Rows& push, const Rows& pull, int priority,
                            double weight = 1.0);
  // Waits until the pulls of a key, or of all keys, have written their values.
  absl::Status Wait(std::string_view key);
  absl::Status WaitAll();

  // Returns this worker's next range of samples (WorkQueue). FailedPrecondition in sync modes with
  // several workers. `share`: number of the plan, from 1; all workers must pass the same plan for
  // it. The pushes of the worker's first `applied` ranges of this share have been applied. If other
  // workers hold all remaining ranges, waits until they finish or are gone, and sets `waited`; no
  // worker waits for this one meanwhile, and it must pull before its next push. Call from one
  // thread at a time.
  struct Work {
    WorkRange range;
    bool waited = false;
  };
  absl::StatusOr<Work> Take(uint32_t share, const WorkPlan& plan, uint64_t applied);

  // Collective: all workers must make the calls below, up to Load.
  absl::Status SetOptimizer(std::string_view spec);  // OptimizerSpec
  absl::Status Barrier();
  // Worker 0 writes or reads PATH, with all values and the optimizer's slots. Each worker writes
  // its residuals to PATH.worker-RANK, and reads them if the codec has any; a worker that did not
  // exist at the time of the save begins without residuals. InvalidArgument for a file that can't
  // be read or written, or that belongs to another save; nothing has changed then, unless a file
  // could not get its final name.
  absl::Status Save(const std::string& path);
  absl::Status Load(const std::string& path);

  std::string Describe() const;
  uint64_t bytes_sent() const { return plane_->bytes_sent(); }
  // Leaves the store when the servers have taken all pushes. A second call does nothing.
  absl::Status Close();

 private:
  struct Key {
    std::shared_ptr<float[]> residual;  // null: the codec needs none
    uint64_t pushes = 0;
    uint64_t asked = 0;       // pushes before the last pull
    uint64_t applied = 0;     // pushes known to be applied on all servers
    size_t pulls = 0;         // slices whose values are awaited
    bool is_written = false;  // the receiver is writing to the caller's memory
  };
  struct Pulled {
    size_t key = 0, slice = 0;
    TensorView out;  // null data: the pull asks only for the number of updates
    // Null: `out` is the slice's output. For a pull of rows: all its rows; `out` is the output of
    // all of them.
    std::shared_ptr<const RowOrder> rows = nullptr;
    Range part = {};  // the slice's range of rows->ids
    size_t width = 0;
  };

  StoreWorker(std::unique_ptr<MessagePlane> plane, const Options& options);
  absl::Status Connect();
  absl::Status Enter();
  // True if this worker is joining and the others have already made the next call of this kind.
  bool CatchesUp(Together what);
  absl::Status Start(std::string_view key, TensorView* gradient, TensorView* out, int priority,
                     double weight = 1.0);
  absl::Status CheckWeightOf(std::string_view key, double weight) const;
  // Find a key's index and check the arguments; InvalidArgument names the key.
  absl::Status FindKey(std::string_view key, size_t* index) const;
  absl::Status FindRows(std::string_view key, const Rows& rows, size_t* index) const;
  absl::Status StartRows(std::string_view key, const Rows* push, const Rows* pull, int priority,
                         double weight);
  // A push, a pull or both of a key.
  struct Use {
    uint64_t number = 0;   // number of the push, or of the last push before the pull
    uint64_t request = 0;  // request of the pull's first slice; those of the others follow
    float* residual = nullptr;
  };
  using PulledOf = absl::FunctionRef<Pulled(size_t)>;  // by slice
  // Waits until the key's last pull is over and there is room to send. `pulled` returns each
  // slice's awaited values; null: no pull.
  absl::StatusOr<Use> Begin(size_t key, bool pushes, const PulledOf* pulled);
  // In sync, waits until fewer than kMostAhead of the key's pushes are not applied.
  absl::Status AwaitOthers(size_t key);
  // The key of a push's random numbers, for codecs with stochastic rounding.
  uint64_t DrawsKey(const CodecSpec& spec, std::string_view key) const;
  absl::Status CallAll(Together what, const std::vector<std::string>& bodies);
  absl::Status CallAll(Together what);
  absl::Status AwaitRoom();
  absl::Status SendTo(size_t server, int priority, const StoreHead& head,
                      std::vector<uint8_t> body);
  void OnPeer(const PeerEvent& event);
  // Fails the store when a server has been away for longer than the timeout.
  void CheckLost();
  size_t ServerOf(size_t slice) const {
    return static_cast<size_t>(layout_.slices()[slice].server);
  }
  // A worker's file of residuals.
  struct Part {
    std::optional<uint64_t> save;               // number of its save; none: nothing was read
    std::vector<std::vector<float>> residuals;  // by key; empty: none
  };
  absl::StatusOr<std::vector<uint8_t>> GetState(size_t slice);
  absl::StatusOr<std::string> StatesAsFile();
  absl::StatusOr<uint64_t> SaveNumber();
  std::string ResidualsAsFile(uint64_t save) const;
  // Writes this worker's files of a save under draft names. `files`: their final paths.
  absl::Status WriteFiles(const std::string& path, std::vector<std::string>* files);
  static absl::Status WriteDraft(const std::string& path, const std::string& file,
                                 std::vector<std::string>* files);
  absl::StatusOr<Part> ReadPart(const std::string& path) const;
  // Sends the file's states to the servers. `part`: worker 0's, which must be of the same save.
  absl::Status PutStates(const std::string& file, Part* part);
  // Waits until `done` returns true or the store has failed. A timeout fails the store with the
  // text of `late`. Both are called with mu_ held.
  template <typename Done, typename Late>
  absl::Status Await(Done done, Late late);
  absl::Status AwaitAnswers();  // from servers with journals, to all messages

  void Receive();
  void OnMessage(const Message& message);
  void OnValues(int server, const StoreHead& head, Bytes body);
  absl::Status TakeRows(const Pulled& pulled, const CodecSpec& down, StoreHead::Form form,
                        Bytes body) const;
  void Fail(absl::Status reason);
  std::string AwaitedPulls() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  static constexpr int kLast = std::numeric_limits<int>::min();  // priority behind all pushes
  // Added to the timeout, so that servers, which know who is missing, time out first.
  static constexpr std::chrono::milliseconds kGrace{2000};

  const std::unique_ptr<MessagePlane> plane_;
  const int rank_;
  Options options_;
  const Backend& backend_;
  StoreLayout layout_;
  ErrorFeedback feedback_;
  std::vector<std::unique_ptr<DeltaReader>> readers_;  // by slice
  std::vector<std::unique_ptr<Resender>> resenders_;   // by server
  std::map<Together, uint64_t> calls_made_;
  std::map<uint32_t, uint64_t> taken_;  // number of ranges taken, by share
  bool has_joined_ = false;
  // By Together: how many calls complete without this worker.
  std::array<uint64_t, kTogetherKinds> calls_before_{};
  bool is_closed_ = false;

  mutable absl::Mutex mu_;
  SteadyCondVar changed_;
  std::map<int, Message> welcomes_ ABSL_GUARDED_BY(mu_);  // by server
  bool has_pushed_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  bool is_leaving_ ABSL_GUARDED_BY(mu_) = false;  // set before kLeave is sent
  bool is_closing_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<Key> keys_ ABSL_GUARDED_BY(mu_);
  uint64_t last_request_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uint64_t, Pulled> pulled_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, std::vector<uint8_t>> states_ ABSL_GUARDED_BY(mu_);
  uint64_t work_request_ ABSL_GUARDED_BY(mu_) = 0;                              // of Take
  std::optional<std::pair<StoreHead, std::string>> work_ ABSL_GUARDED_BY(mu_);  // Take's answer
  std::set<int> connected_ ABSL_GUARDED_BY(mu_);                                // servers
  uint64_t queued_ ABSL_GUARDED_BY(mu_) = 0;  // bytes passed to SendTo since the start
  std::map<std::pair<uint32_t, uint64_t>, std::set<int>> done_ ABSL_GUARDED_BY(mu_);
  std::string refusal_ ABSL_GUARDED_BY(mu_);  // why servers refused the collective in progress
  std::thread receiver_;
};

template <typename Done, typename Late>
absl::Status StoreWorker::Await(Done done, Late late) {
  Deadline deadline = Clock::now() + options_.timeout + kGrace;
  absl::Status reason;
  {
    const absl::MutexLock lock(&mu_);
    while (failure_.ok() && !done()) {
      changed_.WaitUntil(&mu_, deadline);
      const Deadline now = Clock::now();
      if (!failure_.ok() || done() || now < deadline) continue;
      if (now - deadline > kGrace / 2) {
        // The process was suspended; give the receiver time for messages that came meanwhile.
        deadline = now + kGrace;
      } else {
        reason = absl::DeadlineExceededError(
            absl::StrCat("worker ", rank_, ": ", late(), " within ",
                         std::chrono::duration<double>(options_.timeout + kGrace).count(), " s"));
        break;
      }
    }
    if (reason.ok()) return failure_;
  }
  Fail(reason);
  return reason;
}

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_HOST_WORKER_H_
