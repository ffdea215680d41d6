#include "integrations/c/text.h"

#include <cstring>

#include "absl/strings/str_cat.h"

namespace thinwire {

absl::Status WriteText(const char* what, const std::string& text, char* room, size_t capacity) {
  if (text.size() >= capacity) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " '", text, "' needs ", text.size() + 1, " bytes, got ", capacity));
  }
  std::memcpy(room, text.c_str(), text.size() + 1);
  return absl::OkStatus();
}

}  // namespace thinwire
