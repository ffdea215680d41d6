#include "integrations/nccl_shim/nccl_session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/nccl/nccl.h"

namespace thinwire {
namespace {

// The names that the errors have in Python and in C.
const char* TypeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument: return "InvalidArgumentError";
    case absl::StatusCode::kFailedPrecondition: return "MismatchError";
    case absl::StatusCode::kDeadlineExceeded: return "TimeoutError";
    default: return "UnavailableError";
  }
}

}  // namespace

bool NcclSession::IsCapturing(void* stream) {
  return device() != nullptr && device()->Adopt(stream)->IsCapturing();
}

Device* NcclSession::device() {
  if (device_.ok() && *device_ == nullptr) {
    int ordinal = 0;
    const NcclResult result = means_.next.comm_device(handle_, &ordinal);
    device_ = result == kNcclOk
                  ? means_.open_device(ordinal)
                  : absl::InternalError(absl::StrCat("NCCL does not say which device it is on (",
                                                     static_cast<int>(result), ")"));
  }
  return device_.ok() ? device_->get() : nullptr;
}

NcclReducer* NcclSession::reducer() {
  if (asked_) return agreed_ ? reducer_.get() : nullptr;
  asked_ = true;
  const absl::Status agreed = Agree();
  agreed_ = agreed.ok();
  means_.say(absl::StrCat(
      "rank ", members_.rank, " of ", members_.size, ": ",
      agreed_
          ? absl::StrCat("allreduces of ", settings_.min_bytes,
                         " bytes and more on this communicator go as ", settings_.codec.ToString())
          : absl::StrCat(TypeOf(agreed), ": this communicator goes on uncompressed, on ",
                         "all ranks: ", agreed.message())));
  return agreed_ ? reducer_.get() : nullptr;
}

absl::Status NcclSession::Agree() {
  const Deadline deadline = Clock::now() + settings_.timeout;
  if (device() == nullptr) return device_.status();
  const absl::StatusOr<std::shared_ptr<const NcclLibrary>> nccl = means_.load_nccl();
  if (!nccl.ok()) return nccl.status();
  absl::StatusOr<std::unique_ptr<NcclReducer>> mine = MakeReducer(*nccl);
  if (mine.ok()) reducer_ = *std::move(mine);
  absl::StatusOr<std::unique_ptr<StreamPlane>> plane =
      JoinNccl(*nccl, members_, twin_, *device_, deadline, nullptr, 1);
  if (!plane.ok()) {
    return absl::Status(plane.status().code(),
                        absl::StrCat("not all ranks came within ", settings_.timeout.count(),
                                     " ms; set THINWIRE_NCCL_CODEC and LD_PRELOAD on all of them (",
                                     plane.status().message(), ")"));
  }
  // All are there, so that who was late to come still has time to say what he has to say.
  remains_.plane = *std::move(plane);
  return AgreeOver(*remains_.plane, **device_, mine.ok() ? Terms() : mine.status(),
                   Clock::now() + settings_.timeout, &remains_);
}

absl::StatusOr<std::string> NcclSession::Terms() const {
  return absl::StrCat(settings_.codec.ToString(), " from ", settings_.min_bytes,
                      " bytes on (thinwire " THINWIRE_VERSION ")");
}

absl::StatusOr<std::unique_ptr<NcclReducer>> NcclSession::MakeReducer(
    std::shared_ptr<const NcclLibrary> nccl) const {
  if (!settings_.refusal.ok()) return settings_.refusal;
  return NcclReducer::Make(NcclComm::Borrow(std::move(nccl), members_, handle_, *device_), *device_,
                           settings_.codec, settings_.feedback_bytes);
}

}  // namespace thinwire
