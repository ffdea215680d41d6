#include "integrations/c/call.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "integrations/c/text.h"

namespace thinwire {

absl::Status CheckComm(const char* function, const tw_comm* comm,
                       std::initializer_list<const void*> pointers) {
  const auto is_null = [](const void* pointer) { return pointer == nullptr; };
  if (comm == nullptr || std::any_of(pointers.begin(), pointers.end(), is_null)) {
    return absl::InvalidArgumentError(absl::StrCat(function, " got a null pointer"));
  }
  return comm->home.Check();
}

absl::Status CheckCall(const tw_comm* comm, tw_dtype dtype, tw_op op, const void* stream) {
  if (comm == nullptr) return absl::InvalidArgumentError("the communicator is null");
  if (absl::Status bad = comm->home.Check(); !bad.ok()) return bad;
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

CallSegments SegmentsOf(const tw_segment* segments, size_t count) {
  CallSegments call;
  for (size_t i = 0; i < count; ++i) {
    const tw_segment& s = segments[i];
    call.segments.push_back(
        {.name = std::string(TextOf(s.name)),
         .offset = s.offset,
         .count = s.count,
         .total = s.total,
         .codec = static_cast<uint32_t>(std::min<size_t>(s.codec, UINT32_MAX))});
    if (s.absent != 0) call.absent.push_back(static_cast<uint32_t>(i));
  }
  return call;
}

}  // namespace thinwire
