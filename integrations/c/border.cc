#include "integrations/c/border.h"

#include <algorithm>
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

absl::Status CheckHome(pid_t home, const char* what) {
  if (IsHome(home)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "this ", what, " is that of process ", home, ", and process ", getpid(),
      " is forked from it, without its threads; leave its calls to the parent, or make a ", what,
      " in the child"));
}

absl::Status CheckComm(const char* function, const tw_comm* comm,
                       std::initializer_list<const void*> pointers) {
  const auto is_null = [](const void* pointer) { return pointer == nullptr; };
  if (comm == nullptr || std::any_of(pointers.begin(), pointers.end(), is_null)) {
    return absl::InvalidArgumentError(absl::StrCat(function, " got a null pointer"));
  }
  return CheckHome(comm->home);
}

absl::Status CheckItems(const char* what, size_t count) {
  constexpr size_t kMost = size_t{1} << 24;
  if (count <= kMost) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("got ", count, " ", what, ", expected at most ", kMost));
}

absl::Status CheckCall(const tw_comm* comm, tw_dtype dtype, tw_op op, const void* stream) {
  if (comm == nullptr) return absl::InvalidArgumentError("the communicator is null");
  if (absl::Status bad = CheckHome(comm->home); !bad.ok()) return bad;
  if (dtype != TW_F32 && dtype != TW_BF16 && dtype != TW_F16) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", comm->rank, ": dtype ", static_cast<int>(dtype),
                     " is unknown, expected TW_F32, TW_BF16 or TW_F16"));
  }
  if (op != TW_MEAN && op != TW_SUM) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", comm->rank, ": op ",
                                                   static_cast<int>(op),
                                                   " is unknown, expected TW_MEAN or TW_SUM"));
  }
  if (stream != nullptr && !comm->on_device) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", comm->rank, ": a stream was given, expected null, since this ",
                     "communicator is the host's; make one with options.device = \"cuda\""));
  }
  return absl::OkStatus();
}

}  // namespace thinwire
