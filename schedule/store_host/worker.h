// StoreWorker: one worker of the store, on a MessagePlane that calls the servers.
//
// A thread of its own receives. It writes pulled values to the caller's memory, so the memory of a
// pull belongs to the store until Wait has returned. Gradients are encoded, with the worker's
// residual, on the caller's thread, and may be reused when a push returns.
//
// The first failure is sticky, and the result of every call from then on: the reason that a server
// gives, Unavailable for a server that is lost, DeadlineExceeded after the timeout.
//
// A server with a journal may come back. What a worker has sent to it is kept until it is answered,
// and sent again, in its order, when the server is there again; so calls wait meanwhile, and
// nothing is lost or applied twice. The store fails with Unavailable when the server stays away for
// longer than the timeout.
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

// A key is used by one thread at a time, and Init, SetCodec, SetOptimizer, Barrier, Save, Load and
// Close are called beside no other call. The rest is thread-safe.
class StoreWorker {
 public:
  struct Options {
    int workers = 1;
    StoreMode mode;
    CodecPair codec;  // of the keys, until SetCodec
    StoreLayout::Options layout;
    std::chrono::milliseconds timeout{60000};
    // A push waits while more bytes than this have not left yet, so that a worker that pushes
    // faster than its link does not fill its memory.
    size_t max_queued = size_t{256} << 20;
  };
  // In sync a push of a key waits while so many of this worker's pushes before it are not applied,
  // since servers keep them until every worker has pushed as often.
  static constexpr uint64_t kMostAhead = 8;
  struct Value {
    std::string key;
    TensorView values;
    size_t width = 0;  // of a row-sparse value: elements of a row; 0: it is dense
  };

  // The plane's rank tells the worker's number (serve.h). Waits until all servers are connected;
  // DeadlineExceeded names one that is not. InvalidArgument for a codec that is not for a store,
  // for a quorum of more workers than there are, and for a grace that is not below the timeout.
  //
  // In all modes but sync a worker may join a store that others have set up. Until its first push,
  // the calls of all workers that the others have made before do not wait for them: Init takes the
  // store's values, SetOptimizer leaves the store's numbers, Barrier and Load do nothing.
  // FailedPrecondition in sync, or, from these calls, for a store that is set up differently.
  static absl::StatusOr<std::unique_ptr<StoreWorker>> Create(std::unique_ptr<MessagePlane> plane,
                                                             const Options& options);
  ~StoreWorker();

  int rank() const { return rank_; }               // the worker's number
  bool has_joined() const { return has_joined_; }  // a store that was set up before
  const Options& options() const { return options_; }

  // Keys that are added from then on have it; the same on all workers.
  absl::Status SetCodec(const CodecPair& codec);
  // Adds keys, which get worker 0's values, exact. All workers call it with the same keys and sizes
  // in the same order; it returns when all have.
  absl::Status Init(std::span<const Value> values);

  // A higher priority goes first. A push that follows a pull of its key waits for the pull. With a
  // quorum (mode.h) an update is the mean of its pushes by `weight`, a positive number such as the
  // samples of a gradient; InvalidArgument for one that is not 1 in another mode.
  absl::Status Push(std::string_view key, TensorView gradient, int priority, double weight = 1.0);
  absl::Status Pull(std::string_view key, TensorView out, int priority);
  absl::Status PushPull(std::string_view key, TensorView gradient, TensorView out, int priority,
                        double weight = 1.0);
  // The same for rows of a row-sparse key, in any order: of values and out, row i is row rows[i] of
  // the key. A row that is pushed twice is summed; one that is pulled twice is there twice. Pushes
  // of no rows count as pushes.
  absl::Status PushRows(std::string_view key, std::span<const int64_t> rows, TensorView values,
                        int priority, double weight = 1.0);
  absl::Status PullRows(std::string_view key, std::span<const int64_t> rows, TensorView out,
                        int priority);
  struct Rows {
    std::span<const int64_t> ids;
    TensorView values;  // of `out` with a pull
  };
  // Both by one message to each slice; the rows need not be the same.
  absl::Status PushPullRows(std::string_view key, const Rows& push, const Rows& pull, int priority,
                            double weight = 1.0);
  // Until the pulls of a key, or all, have written their values.
  absl::Status Wait(std::string_view key);
  absl::Status WaitAll();

  // The next range of work for this worker (WorkQueue), in async and ssp: a batch of one of
  // `epochs` times `plan.samples`. `share` counts from 1; each is one plan, the same on all
  // workers. The pushes of the first `applied` ranges that it took of this share have been applied.
  // Waits while others hold all that is left, which they may not finish; then `waited` is set,
  // nobody has waited for this worker, and it pulls before it pushes. One thread at a time.
  struct Work {
    WorkRange range;
    bool waited = false;
  };
  absl::StatusOr<Work> Take(uint32_t share, const WorkPlan& plan, uint64_t applied);

  // All workers make these calls.
  absl::Status SetOptimizer(std::string_view spec);  // OptimizerSpec
  absl::Status Barrier();
  // Worker 0 writes or reads a file of all values and the optimizer's slots, and each worker one of
  // its residuals beside it, PATH.worker-RANK, which is read if the codec has any. A worker that
  // there was none of at that time begins without.
  // InvalidArgument for a file that can't be or is of another save, which changes nothing.
  absl::Status Save(const std::string& path);
  absl::Status Load(const std::string& path);

  std::string Describe() const;
  uint64_t bytes_sent() const { return plane_->bytes_sent(); }
  // Leaves the store when what was pushed has been taken. A second call does nothing.
  absl::Status Close();

 private:
  struct Key {
    std::shared_ptr<float[]> residual;  // null: the codec needs none
    uint64_t pushes = 0;
    uint64_t asked = 0;       // pushes that the last pull follows
    uint64_t applied = 0;     // pushes that servers have said to be applied, at least
    size_t pulls = 0;         // slices that are awaited
    bool is_written = false;  // the receiver is writing to the caller's memory
  };
  struct Pulled {
    size_t key = 0, slice = 0;
    TensorView out;  // without memory: only the number of updates is asked for
    // A pull of rows has them here, and `out` is for all of them; the slice has a part. Null: `out`
    // is for the slice.
    std::shared_ptr<const RowOrder> rows = nullptr;
    Range part = {};  // of rows->ids
    size_t width = 0;
  };

  StoreWorker(std::unique_ptr<MessagePlane> plane, const Options& options);
  absl::Status Connect();
  absl::Status Enter();
  // This worker joins, and the others have made the next call of this kind before.
  bool CatchesUp(Together what);
  absl::Status Start(std::string_view key, TensorView* gradient, TensorView* out, int priority,
                     double weight = 1.0);
  absl::Status CheckWeightOf(std::string_view key, double weight) const;
  // For calls of a key. InvalidArgument names it.
  absl::Status FindKey(std::string_view key, size_t* index) const;
  absl::Status FindRows(std::string_view key, const Rows& rows, size_t* index) const;
  absl::Status StartRows(std::string_view key, const Rows* push, const Rows* pull, int priority,
                         double weight);
  // A push, a pull or both of a key.
  struct Use {
    uint64_t number = 0;   // of the push, or of the last one before the pull
    uint64_t request = 0;  // of the pull's first slice; the others follow
    float* residual = nullptr;
  };
  using PulledOf = absl::FunctionRef<Pulled(size_t)>;  // by slice
  // Begins a use when the key's last pull is over and there is room to send. pulled: what is
  // awaited of each slice; null: nothing.
  absl::StatusOr<Use> Begin(size_t key, bool pushes, const PulledOf* pulled);
  // In sync, until the key's last pushes but kMostAhead are applied.
  absl::Status AwaitOthers(size_t key);
  // The key of the random numbers that a push draws, for codecs with stochastic rounding.
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
  // A worker's own part of what is saved.
  struct Part {
    std::optional<uint64_t> save;               // that it is of; none: it has no part
    std::vector<std::vector<float>> residuals;  // by key; empty: none
  };
  absl::StatusOr<std::vector<uint8_t>> GetState(size_t slice);
  absl::StatusOr<std::string> StatesAsFile();
  absl::StatusOr<uint64_t> SaveNumber();
  std::string ResidualsAsFile(uint64_t save) const;
  // Writes this worker's files of a save beside their places. `files`: these.
  absl::Status WriteFiles(const std::string& path, std::vector<std::string>* files);
  static absl::Status WriteDraft(const std::string& path, const std::string& file,
                                 std::vector<std::string>* files);
  absl::StatusOr<Part> ReadPart(const std::string& path) const;
  // Sends what the file holds. `part`: worker 0's, of the same save.
  absl::Status PutStates(const std::string& file, Part* part);
  // Waits under mu_ until `done`, a failure, or the timeout, which fails the store by what `late`
  // says.
  template <typename Done, typename Late>
  absl::Status Await(Done done, Late late);
  absl::Status AwaitAnswers();  // of servers with journals, to all that was sent

  void Receive();
  void OnMessage(const Message& message);
  void OnValues(int server, const StoreHead& head, Bytes body);
  absl::Status TakeRows(const Pulled& pulled, const CodecSpec& down, StoreHead::Form form,
                        Bytes body) const;
  void Fail(absl::Status reason);
  std::string AwaitedPulls() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  static constexpr int kLast = std::numeric_limits<int>::min();  // priority behind all pushes
  // A server gives up first, since it knows who is missing.
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
  std::map<uint32_t, uint64_t> taken_;  // ranges, by share
  bool has_joined_ = false;
  std::array<uint64_t, kTogetherKinds> calls_before_{};  // that go without it, by Together
  bool is_closed_ = false;

  mutable absl::Mutex mu_;
  SteadyCondVar changed_;
  std::map<int, Message> welcomes_ ABSL_GUARDED_BY(mu_);  // by server
  bool has_pushed_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  bool is_leaving_ ABSL_GUARDED_BY(mu_) = false;  // the next messages say so
  bool is_closing_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<Key> keys_ ABSL_GUARDED_BY(mu_);
  uint64_t last_request_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uint64_t, Pulled> pulled_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, std::vector<uint8_t>> states_ ABSL_GUARDED_BY(mu_);
  uint64_t work_request_ ABSL_GUARDED_BY(mu_) = 0;                              // of Take
  std::optional<std::pair<StoreHead, std::string>> work_ ABSL_GUARDED_BY(mu_);  // its answer
  std::set<int> connected_ ABSL_GUARDED_BY(mu_);                                // servers
  uint64_t queued_ ABSL_GUARDED_BY(mu_) = 0;  // bytes that Send has got, from the start
  std::map<std::pair<uint32_t, uint64_t>, std::set<int>> done_ ABSL_GUARDED_BY(mu_);
  std::string refusal_ ABSL_GUARDED_BY(mu_);  // of the call that is being made
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
        // The process was stopped, and the receiver has not heard yet what came meanwhile.
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
