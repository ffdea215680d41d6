#include "integrations/c/status.h"

#include <string>

namespace thinwire {
namespace {

std::string& Message() {
  thread_local std::string message;
  return message;
}

tw_status CodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk: return TW_OK;
    case absl::StatusCode::kInvalidArgument: return TW_INVALID_ARGUMENT;
    case absl::StatusCode::kFailedPrecondition: return TW_MISMATCH;
    case absl::StatusCode::kDeadlineExceeded: return TW_TIMEOUT;
    case absl::StatusCode::kUnavailable: return TW_PEER_LOST;
    case absl::StatusCode::kUnimplemented: return TW_UNAVAILABLE;
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kAborted: return TW_ABORTED;
    default: return TW_INTERNAL;
  }
}

}  // namespace

tw_status ToC(const absl::Status& status) {
  if (!status.ok()) Message() = std::string(status.message());
  return CodeOf(status);
}

const char* LastError() { return Message().c_str(); }

}  // namespace thinwire
