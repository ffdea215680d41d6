#include "integrations/c/status.h"

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"

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
    case absl::StatusCode::kDataLoss: return TW_DATA_LOSS;
    case absl::StatusCode::kResourceExhausted: return TW_OUT_OF_MEMORY;
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kAborted: return TW_ABORTED;
    default: return TW_INTERNAL;
  }
}

absl::StatusCode StatusCodeOf(tw_status status) {
  switch (status) {
    case TW_OK: return absl::StatusCode::kOk;
    case TW_INVALID_ARGUMENT: return absl::StatusCode::kInvalidArgument;
    case TW_MISMATCH: return absl::StatusCode::kFailedPrecondition;
    case TW_TIMEOUT: return absl::StatusCode::kDeadlineExceeded;
    case TW_PEER_LOST: return absl::StatusCode::kUnavailable;
    case TW_UNAVAILABLE: return absl::StatusCode::kUnimplemented;
    case TW_ABORTED: return absl::StatusCode::kAborted;
    case TW_DATA_LOSS: return absl::StatusCode::kDataLoss;
    case TW_OUT_OF_MEMORY: return absl::StatusCode::kResourceExhausted;
    default: return absl::StatusCode::kInternal;
  }
}

}  // namespace

tw_status ToC(const absl::Status& status) {
  if (!status.ok()) Message() = std::string(status.message());
  return CodeOf(status);
}

const char* LastError() { return Message().c_str(); }

absl::Status FromC(tw_status status, std::string_view message) {
  return {StatusCodeOf(status), absl::string_view(message.data(), message.size())};
}

absl::Status WriteText(const char* what, const std::string& text, char* room, size_t capacity) {
  if (text.size() >= capacity) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " '", text, "' needs ", text.size() + 1, " bytes, got ", capacity));
  }
  std::memcpy(room, text.c_str(), text.size() + 1);
  return absl::OkStatus();
}

}  // namespace thinwire
