#include "transport/gloo/gloo_shared.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/time_left.h"

namespace thinwire {

std::chrono::milliseconds Until(Deadline deadline) {
  using std::chrono::milliseconds;
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
  return std::clamp(left, milliseconds(1), kForever);
}

GlooShared::GlooShared(GlooMesh mesh)
    : context_(std::move(mesh.context)),
      members_{context_->rank, context_->size},
      loop_(std::move(mesh.loop)) {}

// The two aborts set a flag in the buffer and wake whoever waits there; neither blocks or sends.
// They need the lock: outside of it, the waiter could return and its owner free the buffer.
void GlooShared::Fail(const absl::Status& reason) {
  const absl::MutexLock lock(&mu_);
  if (!status_.ok()) return;
  status_ = reason;
  for (UnboundBuffer* buffer : waiting_) {
    buffer->abortWaitRecv();
    buffer->abortWaitSend();
  }
  failed_.SignalAll();
  if (on_failure_) on_failure_();
}

void GlooShared::OnFailure(std::function<void()> tell) {
  const absl::MutexLock lock(&mu_);
  on_failure_ = std::move(tell);
  if (on_failure_ && !status_.ok()) on_failure_();
}

absl::Status GlooShared::status() const {
  const absl::MutexLock lock(&mu_);
  return status_;
}

void GlooShared::FailBroken(const std::string& what) {
  {
    const Deadline patience = Clock::now() + std::chrono::milliseconds(200);
    const absl::MutexLock lock(&mu_);
    while (status_.ok() && Clock::now() < patience) {
      failed_.WaitWithTimeout(&mu_, TimeLeft(patience));
    }
  }
  Fail(absl::UnavailableError(
      absl::StrCat("a connection of rank ", members_.rank, " broke: ", what)));
}

bool GlooShared::Guarded(UnboundBuffer* buffer, const std::function<bool()>& wait) {
  {
    const absl::MutexLock lock(&mu_);
    if (!status_.ok()) return false;
    waiting_.insert(buffer);
  }
  bool done = false;
  std::string error;
  try {
    done = wait();
  } catch (const std::exception& e) {
    error = e.what();
  }
  {
    const absl::MutexLock lock(&mu_);
    waiting_.erase(buffer);
  }
  if (!error.empty()) OnError(error);
  return done && error.empty();
}

void GlooShared::OnError(const std::string& error) {
  if (error.find("imed out") == std::string::npos) return FailBroken(error);
  Fail(absl::DeadlineExceededError(
      absl::StrCat("rank ", members_.rank, " waited past its deadline: ", error)));
}

}  // namespace thinwire
