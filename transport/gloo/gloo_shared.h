// GlooShared: what the planes of one rank share, namely its connections, the thread that may use
// them, what is under way, and the first failure. Thread-safe.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_SHARED_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_SHARED_H_

#include <gloo/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "transport/gloo/gloo_connect.h"
#include "transport/gloo/gloo_loop.h"
#include "transport/membership.h"
#include "transport/store.h"

namespace thinwire {

inline constexpr uint64_t kGlooControlSlot = 2;  // even slots are those of frames

class GlooTransfers;

class GlooShared final : private GlooLoop::Task {
 public:
  using UnboundBuffer = gloo::transport::UnboundBuffer;

  explicit GlooShared(GlooMesh mesh);
  ~GlooShared();

  gloo::Context& context() { return *context_; }
  GlooLoop& loop() { return *loop_; }
  GlooTransfers& transfers() { return *transfers_; }  // on the loop's thread
  const Membership& members() const { return members_; }

  // Keeps the first reason, and ends all exchanges.
  void Fail(const absl::Status& reason);
  absl::Status status() const;

  // Who is told of the failure, at once if it has come; null: nobody any more. `tell` must not
  // block, nor call this object.
  void OnFailure(std::function<void()> tell);

 private:
  void Run() override;  // once, after a failure

  const std::shared_ptr<gloo::Context> context_;
  const Membership members_;
  const std::unique_ptr<GlooTransfers> transfers_;
  const std::unique_ptr<GlooLoop> loop_;  // ends first: what was posted runs by then
  mutable absl::Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::function<void()> on_failure_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_SHARED_H_
