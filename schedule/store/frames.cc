#include "schedule/store/frames.h"

#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace thinwire {

static_assert(std::endian::native == std::endian::little, "heads are little-endian");
static_assert(sizeof(StoreHead) == 32, "heads have no padding");

std::string StoreHead::ToBytes() const {
  return std::string(reinterpret_cast<const char*>(this), sizeof(*this));
}

absl::StatusOr<StoreHead> StoreHead::Parse(std::string_view bytes) {
  if (bytes.size() != sizeof(StoreHead)) {
    return absl::InvalidArgumentError(absl::StrCat("a message's head has ", bytes.size(),
                                                   " bytes, expected ", sizeof(StoreHead)));
  }
  StoreHead head;
  std::memcpy(static_cast<void*>(&head), bytes.data(), sizeof(head));
  if (head.kind > Kind::kError || head.form > Form::kRows || head.reserved != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a message has kind ", static_cast<int>(head.kind), ", form ", static_cast<int>(head.form),
        ", expected kinds to ", static_cast<int>(Kind::kError), " and forms to ",
        static_cast<int>(Form::kRows)));
  }
  return head;
}

}  // namespace thinwire
