#include "transport/gloo/gloo_shared.h"

#include <utility>

#include "transport/gloo/gloo_transfers.h"

namespace thinwire {

GlooShared::GlooShared(GlooMesh mesh)
    : context_(std::move(mesh.context)),
      members_{context_->rank, context_->size},
      transfers_(std::make_unique<GlooTransfers>(*this)),
      loop_(std::move(mesh.loop)) {}

GlooShared::~GlooShared() = default;

void GlooShared::Fail(const absl::Status& reason) {
  const absl::MutexLock lock(&mu_);
  if (!status_.ok()) return;
  status_ = reason;
  loop_->Post(this);
  if (on_failure_) on_failure_();
}

void GlooShared::Run() { transfers_->FailAll(); }

void GlooShared::OnFailure(std::function<void()> tell) {
  const absl::MutexLock lock(&mu_);
  on_failure_ = std::move(tell);
  if (on_failure_ && !status_.ok()) on_failure_();
}

absl::Status GlooShared::status() const {
  const absl::MutexLock lock(&mu_);
  return status_;
}

}  // namespace thinwire
