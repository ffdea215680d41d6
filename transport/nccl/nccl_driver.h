// NcclDriver: decides which thread calls NCCL, in which order, and how the plane learns of ends and
// errors.
//
// An exchange is issued on the thread that begins it: the communicator's stream waits for the
// lane's, NCCL queues its kernel, and the lane's stream waits for that. The host waits for the
// launch, which NCCL does on a thread of its own, and never for a kernel. Exchanges that begin
// meanwhile queue here; those that are sends and receives are then issued as one group.
//
// A thread of the driver checks every 50 µs what has not ended, including launches that take longer
// than usual, and sleeps when nothing is under way.
#ifndef THINWIRE_TRANSPORT_NCCL_NCCL_DRIVER_H_
#define THINWIRE_TRANSPORT_NCCL_NCCL_DRIVER_H_

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "compress/device.h"
#include "transport/nccl/nccl_comm.h"
#include "transport/planes.h"
#include "transport/steady_cond_var.h"

namespace thinwire {

// An exchange, which ends when it is queued on its stream; or a flush, an empty exchange that ends
// when its stream has done the work queued before.
struct NcclOp {
  enum class Kind { kExchange, kFlush };

  NcclOp(Kind kind, DeviceStream& stream, std::shared_ptr<DeviceEvent> before)
      : kind(kind), stream(stream), before(std::move(before)) {}

  const Kind kind;
  DeviceStream& stream;
  // The end of the stream's work when the op was begun.
  const std::shared_ptr<DeviceEvent> before;
  std::vector<Bytes> send;
  std::vector<MutableBytes> recv;

  // The driver's lock guards the rest.
  bool ended = false;
  absl::Status status;
  std::function<void(absl::Status)> done;
};

// Thread-safe.
class NcclDriver {
 public:
  // All exchanges run on `stream`, a stream of the communicator's device.
  NcclDriver(std::unique_ptr<NcclComm> comm, std::unique_ptr<DeviceStream> stream);
  // Ends what is under way, then the communicator: in an orderly way if nothing was under way.
  // Returns after a few seconds in any case.
  ~NcclDriver();

  DeviceStream& stream() { return *stream_; }

  // Exchanges are issued in the order of the calls.
  void Begin(const std::shared_ptr<NcclOp>& op);
  absl::Status Wait(NcclOp& op, Deadline deadline);
  void OnDone(NcclOp& op, std::function<void(absl::Status)> done);

  // Calls work(communicator) when NCCL accepts calls, and returns afterwards. Returns false without
  // calling it once the communicator is aborted. Don't call it in a callback of OnDone.
  bool Do(absl::FunctionRef<void(NcclComm&)> work);
  // Only for its functions that any thread may call.
  const NcclComm& comm() const { return *comm_; }
  // Like NcclComm::Keep; call it before the first exchange.
  void Keep(DeviceMemory memory) { comm_->Keep(std::move(memory)); }

  // After a failure, exchanges that have not ended end with the first reason, once the device no
  // longer uses their blocks.
  const std::shared_ptr<Failure>& failure() const { return failure_; }

 private:
  using OpPtr = std::shared_ptr<NcclOp>;

  void Run();
  bool AwaitWork();
  void Pump();
  bool BeginPumping() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void GoOnPumping();
  bool Step();
  bool TakeNext();
  bool Issue();
  void Issued();
  bool EndFlushes(const absl::Status& failure);
  bool EndAfterFailure(const absl::Status& failure);
  void LookForErrors();
  bool IsQuiet();
  void End(NcclOp& op, const absl::Status& status);

  bool HasWork() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return stopped_ || (!pumping_ && (!queue_.empty() || in_progress_)) || !flushes_.empty() ||
           (failure_->failed() && !settled_);
  }

  bool IsFree() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !pumping_ && !in_progress_; }

  const std::shared_ptr<Failure> failure_ = Failure::Make();
  // Used by the thread that pumps, one at a time.
  const std::unique_ptr<NcclComm> comm_;
  const std::unique_ptr<DeviceStream> stream_;
  std::vector<OpPtr> issuing_;         // NCCL launches them and accepts no other; empty: it is free
  std::vector<NcclBlocks> blocks_;     // those of issuing_
  std::shared_ptr<DeviceEvent> last_;  // the end of the last exchange
  bool aborted_ = false;
  Deadline next_look_{}, give_up_{};  // give_up_: limit for ending aborted work

  absl::Mutex mu_;
  SteadyCondVar ended_;  // signalled when an op ends
  bool pumping_ ABSL_GUARDED_BY(mu_) = false;
  bool again_ ABSL_GUARDED_BY(mu_) = false;        // the pumping thread has more to do
  bool in_progress_ ABSL_GUARDED_BY(mu_) = false;  // NCCL is not done with issuing_
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  bool settled_ ABSL_GUARDED_BY(mu_) = false;        // nothing is under way after the failure
  std::deque<OpPtr> queue_ ABSL_GUARDED_BY(mu_);     // exchanges to issue
  std::vector<OpPtr> flushes_ ABSL_GUARDED_BY(mu_);  // not ended
  std::thread thread_;
  Failure::Listener listener_;  // destroyed first
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_NCCL_NCCL_DRIVER_H_
