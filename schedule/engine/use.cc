#include "schedule/engine/use.h"

#include <bit>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "schedule/engine/checks.h"
#include "schedule/hash.h"

namespace thinwire {

ChunkJob Use::JobOf(uint32_t chunk, const Options& options) const {
  ChunkJob job = bucket->JobOf(
      chunk, step, {memory.residual.get(), memory.array(0), memory.carried.get()}, options);
  job.tag = bucket->TagOf(id(), chunk);
  job.input = input;
  job.output = output;
  job.undo = memory.undo.get();
  job.absent = absent;
  if (divisor != 0.0f) {
    job.scale = 1.0f / divisor;
    // Ranks that divide by something else never meet, as in Bucket::TagOf.
    job.tag = HashCombine(job.tag, std::bit_cast<uint32_t>(divisor));
  }
  return job;
}

void Use::Renew() {
  finisher = nullptr;
  const absl::MutexLock lock(&mu_);
  chunks_left_ = bucket->partition().chunks.size();
  chunks_running_ = 0;
  done_ = false;
  status_ = absl::OkStatus();
}

bool Use::BeginChunk() {
  const absl::MutexLock lock(&mu_);
  if (closed_) return false;
  ++chunks_running_;
  return true;
}

Use::Left Use::EndChunk(bool ok) {
  const absl::MutexLock lock(&mu_);
  --chunks_running_;
  if (ok && --chunks_left_ == 0) return Left::kDone;
  return closed_ && chunks_running_ == 0 ? Left::kFailed : Left::kSome;
}

bool Use::Close() {
  const absl::MutexLock lock(&mu_);
  closed_ = true;
  return chunks_running_ == 0 && chunks_left_ > 0;
}

void Use::Complete(absl::Status status) {
  const absl::MutexLock lock(&mu_);
  done_ = true;
  status_ = std::move(status);
}

absl::Status Use::WaitOn(void* later) {
  if (finisher != nullptr && !done()) finisher->Help(shared_from_this());
  std::shared_ptr<Fence> fence;
  {
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&done_));
    if (!status_.ok() || order.fence == nullptr) return status_;
    fence = order.fence;
  }
  const std::unique_ptr<DeviceStream> caller = device->Adopt(later);
  if (absl::Status status = CheckNotCaptured(*caller, absl::StrCat("tensor '", label, "'"));
      !status.ok()) {
    return status;
  }
  fence->HoldBack(*caller);
  return caller->status();
}

bool Use::done() const {
  const absl::MutexLock lock(&mu_);
  return done_;
}

std::string Use::Describe(Deadline now) const {
  const std::chrono::duration<double> since = now - submitted;
  const absl::MutexLock lock(&mu_);
  return absl::StrCat("tensor '", label, "' call ", report.call, ", ", report.numel,
                      " elements, in flight for ", since.count(), " s: ", chunks_left_, " of ",
                      report.chunks, " chunks left, ", chunks_running_, " running\n");
}

std::shared_ptr<Work> DoneWork() {
  auto work = std::make_shared<Use>();
  work->Complete(absl::OkStatus());
  return work;
}

}  // namespace thinwire
