#include "transport/nccl/nccl_driver.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/store.h"

namespace thinwire {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr microseconds kNap(50);
constexpr size_t kMostGrouped = 16;  // exchanges
constexpr milliseconds kLook(5);     // between checks for errors that no thread waits for
// How long a device may take to end aborted kernels, and NCCL to finish.
constexpr milliseconds kAbortPatience(5000), kFinishPatience(1000);

}  // namespace

NcclDriver::NcclDriver(std::unique_ptr<NcclComm> comm, std::unique_ptr<DeviceStream> stream)
    : comm_(std::move(comm)),
      stream_(std::move(stream)),
      thread_([this] { Run(); }),
      // Taking the lock makes waiting threads check their conditions.
      listener_(failure_->Listen([this] { const absl::MutexLock lock(&mu_); })) {}

NcclDriver::~NcclDriver() {
  failure_->Fail(absl::CancelledError("the plane was destroyed"));
  {
    const absl::MutexLock lock(&mu_);
    stopped_ = true;
  }
  thread_.join();
  if (!aborted_) comm_->Finish(Clock::now() + kFinishPatience);
}

// A flush waits for the device even after a failure: exchanges that were queued before it may still
// use their blocks.
void NcclDriver::Begin(const OpPtr& op) {
  absl::Status failure;
  bool pumps = false;
  {
    const absl::MutexLock lock(&mu_);
    if (op->kind == NcclOp::Kind::kFlush) {
      settled_ = false;
      flushes_.push_back(op);
      return;
    }
    failure = failure_->reason();
    if (failure.ok()) {
      queue_.push_back(op);
      pumps = BeginPumping();
    }
  }
  if (!failure.ok()) return End(*op, failure);
  if (pumps) GoOnPumping();
}

absl::Status NcclDriver::Wait(NcclOp& op, Deadline deadline) {
  {
    const absl::MutexLock lock(&mu_);
    while (!op.ended && Clock::now() < deadline) ended_.WaitUntil(&mu_, deadline);
    if (op.ended) return op.status;
  }
  failure_->Fail(absl::DeadlineExceededError(absl::StrCat(
      "rank ", comm_->members().rank, " of ", comm_->members().size,
      ": an exchange over NCCL did not end before the deadline; look which rank is late or gone, "
      "or raise the timeout")));
  const absl::MutexLock lock(&mu_);
  while (!op.ended) ended_.Wait(&mu_);
  return op.status;
}

void NcclDriver::OnDone(NcclOp& op, std::function<void(absl::Status)> done) {
  {
    const absl::MutexLock lock(&mu_);
    if (!op.ended) {
      op.done = std::move(done);
      return;
    }
  }
  done(op.status);
}

bool NcclDriver::Do(absl::FunctionRef<void(NcclComm&)> work) {
  {
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(this, &NcclDriver::IsFree));
    pumping_ = true;
  }
  const bool lives = !aborted_;
  if (lives) work(*comm_);
  GoOnPumping();
  return lives;
}

void NcclDriver::Run() {
  prctl(PR_SET_TIMERSLACK, 1);  // nanosecond; else a nap takes 50 µs longer
  while (AwaitWork()) {
    Pump();
    std::this_thread::sleep_for(kNap);
  }
}

// False once the driver must end and nothing is under way.
bool NcclDriver::AwaitWork() {
  const absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(this, &NcclDriver::HasWork));
  return !stopped_ || !settled_;
}

// Does all that can be done now; if another thread is pumping, that thread does it instead.
void NcclDriver::Pump() {
  bool pumps = false;
  {
    const absl::MutexLock lock(&mu_);
    pumps = BeginPumping();
  }
  if (pumps) GoOnPumping();
}

// True if the calling thread must pump; else another thread does.
bool NcclDriver::BeginPumping() {
  if (!std::exchange(pumping_, true)) return true;
  again_ = true;
  return false;
}

void NcclDriver::GoOnPumping() {
  for (bool advanced = true; advanced;) {
    advanced = Step();
    const absl::MutexLock lock(&mu_);
    advanced |= std::exchange(again_, false);
    pumping_ = advanced;
  }
}

bool NcclDriver::Step() {
  const absl::Status failure = failure_->reason();
  if (!failure.ok()) return EndAfterFailure(failure);
  LookForErrors();
  const bool flushed = EndFlushes(absl::OkStatus());
  return (TakeNext() && Issue()) || flushed;
}

// Checks for errors of earlier work, and whether NCCL has launched the exchanges in issuing_.
void NcclDriver::LookForErrors() {
  if (issuing_.empty() && Clock::now() < next_look_) return;
  next_look_ = Clock::now() + kLook;
  const absl::StatusOr<NcclComm::Progress> progress = comm_->Poll();
  if (!progress.ok()) return failure_->Fail(progress.status());
  if (*progress == NcclComm::Progress::kDone && !issuing_.empty()) Issued();
}

// Moves what can be issued as one group from queue_ to issuing_; false if there is nothing, or NCCL
// accepts nothing now.
bool NcclDriver::TakeNext() {
  const int rank = comm_->members().rank;
  const auto is_gather = [rank](const OpPtr& op) {
    return IsGatherInPlace(rank, op->send, op->recv);
  };
  const absl::MutexLock lock(&mu_);
  in_progress_ = !issuing_.empty();
  if (in_progress_ || failure_->failed()) return false;
  while (!queue_.empty() && issuing_.size() < kMostGrouped) {
    if (!issuing_.empty() && is_gather(queue_.front())) break;
    issuing_.push_back(std::move(queue_.front()));
    queue_.pop_front();
    if (is_gather(issuing_.back())) break;
  }
  return !issuing_.empty();
}

// False if NCCL must be polled later.
bool NcclDriver::Issue() {
  blocks_.clear();
  for (const OpPtr& op : issuing_) {
    stream_->WaitFor(op->before);
    blocks_.push_back({op->send, op->recv});
  }
  const absl::StatusOr<NcclComm::Progress> progress = comm_->Launch(blocks_, stream_->handle());
  if (!progress.ok()) {
    failure_->Fail(progress.status());  // the next step ends them
    return true;
  }
  if (*progress == NcclComm::Progress::kDone) {
    Issued();
    return true;
  }
  const absl::MutexLock lock(&mu_);
  in_progress_ = true;
  return false;
}

void NcclDriver::Issued() {
  last_ = stream_->Record();
  for (const OpPtr& op : issuing_) op->stream.WaitFor(last_);
  const absl::Status broken = stream_->status();
  if (!broken.ok()) failure_->Fail(broken);
  const absl::Status how = broken.ok() ? broken : failure_->reason();
  for (const OpPtr& op : issuing_) End(*op, how);
  issuing_.clear();
}

// Ends the flushes whose streams are done; with the failure, if there is one, or the device's.
bool NcclDriver::EndFlushes(const absl::Status& failure) {
  std::vector<OpPtr> flushes;
  {
    const absl::MutexLock lock(&mu_);
    flushes = flushes_;
  }
  bool ended = false;
  for (const OpPtr& op : flushes) {
    if (!op->stream.HasReached(op->before) && (failure.ok() || Clock::now() < give_up_)) continue;
    const absl::Status broken = op->stream.status();
    if (!broken.ok()) failure_->Fail(broken);
    {
      const absl::MutexLock lock(&mu_);
      std::erase(flushes_, op);
    }
    End(*op, broken.ok() ? failure : failure_->reason());
    ended = true;
  }
  return ended;
}

// A communicator with nothing under way is not aborted but ended in an orderly way later.
bool NcclDriver::EndAfterFailure(const absl::Status& failure) {
  if (!aborted_ && !IsQuiet()) {
    aborted_ = true;
    give_up_ = Clock::now() + kAbortPatience;
    comm_->Abort();
  }
  std::deque<OpPtr> queue;
  {
    const absl::MutexLock lock(&mu_);
    queue.swap(queue_);
  }
  if (aborted_ && (comm_->HasEnded() || Clock::now() >= give_up_)) {
    queue.insert(queue.begin(), issuing_.begin(), issuing_.end());
    issuing_.clear();
  }
  for (const OpPtr& op : queue) End(*op, failure);
  const bool ended = EndFlushes(failure);
  const absl::MutexLock lock(&mu_);
  in_progress_ = !issuing_.empty();
  settled_ = queue_.empty() && flushes_.empty() && !in_progress_;
  return ended || !queue.empty();
}

bool NcclDriver::IsQuiet() {
  if (!issuing_.empty() || !stream_->HasReached(last_)) return false;
  const absl::StatusOr<NcclComm::Progress> progress = comm_->Poll();
  return progress.ok() && *progress == NcclComm::Progress::kDone;
}

void NcclDriver::End(NcclOp& op, const absl::Status& status) {
  std::function<void(absl::Status)> done;
  {
    const absl::MutexLock lock(&mu_);
    op.ended = true;
    op.status = status;
    done = std::move(op.done);
    ended_.SignalAll();
  }
  if (done != nullptr) done(status);
}

}  // namespace thinwire
