// What all parts of one rank's Gloo transport share: the first failure, and which waits it must
// end.
#ifndef THINWIRE_TRANSPORT_GLOO_SHARED_H_
#define THINWIRE_TRANSPORT_GLOO_SHARED_H_

#include <gloo/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "compress/types.h"
#include "transport/store.h"

namespace thinwire {

// Gloo closes every connection when one of its waits times out. So its timeouts are only the last
// resort, and what ends a wait early is Abort.
inline constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);

inline std::chrono::milliseconds Until(Deadline deadline) {
  using std::chrono::milliseconds;
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
  return std::clamp(left, milliseconds(1), kForever);
}

class GlooShared {
 public:
  using UnboundBuffer = gloo::transport::UnboundBuffer;

  explicit GlooShared(std::shared_ptr<gloo::Context> context) : context_(std::move(context)) {}

  gloo::Context& context() { return *context_; }
  int rank() const { return context_->rank; }
  int size() const { return context_->size; }

  void Fail(const absl::Status& reason) {
    const std::lock_guard lock(mu_);
    if (!status_.ok()) return;
    status_ = reason;
    for (UnboundBuffer* buffer : waiting_) {
      buffer->abortWaitRecv();
      buffer->abortWaitSend();
    }
    changed_.notify_all();
  }

  absl::Status status() const {
    const std::lock_guard lock(mu_);
    return status_;
  }

  // A connection that broke under an exchange. The control reader of that peer knows its rank and
  // speaks within moments; only if it does not, Gloo's words must do.
  void FailBroken(const std::string& what) {
    {
      std::unique_lock lock(mu_);
      changed_.wait_for(lock, std::chrono::milliseconds(200), [this] { return !status_.ok(); });
    }
    Fail(absl::UnavailableError(absl::StrCat("a connection of rank ", rank(), " broke: ", what)));
  }

  // Runs wait() (a Gloo wait on `buffer`) so that a failure ends it, also one that came first.
  template <typename Wait>
  bool Guarded(UnboundBuffer* buffer, Wait wait) {
    {
      const std::lock_guard lock(mu_);
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
      const std::lock_guard lock(mu_);
      waiting_.erase(buffer);
    }
    if (!error.empty()) OnError(error);
    return done && error.empty();
  }

  std::atomic<uint64_t> bytes_sent{0};

 private:
  void OnError(const std::string& error) {
    if (error.find("imed out") == std::string::npos) return FailBroken(error);
    Fail(absl::DeadlineExceededError(
        absl::StrCat("rank ", rank(), " waited past its deadline: ", error)));
  }

  const std::shared_ptr<gloo::Context> context_;
  mutable std::mutex mu_;
  std::condition_variable changed_;
  absl::Status status_;
  std::unordered_set<UnboundBuffer*> waiting_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_SHARED_H_
