#include "compress/element_limit.h"

#include "absl/strings/str_cat.h"

namespace thinwire {

absl::Status CheckElements(size_t numel) {
  if (numel <= kMostElements) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("got ", numel, " elements, expected at most ", kMostElements));
}

}  // namespace thinwire
