// GlooShared: what the planes of one rank share, namely its connections, the thread that may use
// them, the first failure, and the waits that a failure must end. Thread-safe.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_SHARED_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_SHARED_H_

#include <gloo/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "transport/gloo/gloo_connect.h"
#include "transport/gloo/gloo_loop.h"
#include "transport/membership.h"
#include "transport/store.h"

namespace thinwire {

inline constexpr uint64_t kGlooControlSlot = 2;  // even slots are the control plane's

// Gloo closes every connection when one of its waits times out. So its timeouts are only the last
// resort, and what ends a wait early is Abort.
inline constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);

// Gloo's timeout of a wait that ends at the deadline; at least 1 ms, because 0 means none.
std::chrono::milliseconds Until(Deadline deadline);

class GlooShared {
 public:
  using UnboundBuffer = gloo::transport::UnboundBuffer;

  explicit GlooShared(GlooMesh mesh);

  gloo::Context& context() { return *context_; }
  GlooLoop& loop() { return *loop_; }
  const Membership& members() const { return members_; }

  // Keeps the first reason, and ends all guarded waits.
  void Fail(const absl::Status& reason);
  absl::Status status() const;

  // Who is told of the failure, at once if it has come; null: nobody any more. `tell` must not
  // block, nor call this object.
  void OnFailure(std::function<void()> tell);

  // Fails because a connection broke under an exchange. The control channel of that peer knows its
  // rank and speaks within moments, for which this waits; only if it does not, Gloo's words must
  // do.
  void FailBroken(const std::string& what);

  // Runs wait() (a Gloo wait on `buffer`) so that a failure ends it, also one that came first.
  // False when the plane has failed, or fails by what wait() throws.
  bool Guarded(UnboundBuffer* buffer, const std::function<bool()>& wait);

 private:
  void OnError(const std::string& error);

  const std::shared_ptr<gloo::Context> context_;
  const Membership members_;
  const std::unique_ptr<GlooLoop> loop_;
  mutable absl::Mutex mu_;
  absl::CondVar failed_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::function<void()> on_failure_ ABSL_GUARDED_BY(mu_);
  std::unordered_set<UnboundBuffer*> waiting_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_SHARED_H_
