// C strings: of callers, of which null means empty, and for callers.
#ifndef THINWIRE_INTEGRATIONS_C_TEXT_H_
#define THINWIRE_INTEGRATIONS_C_TEXT_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace thinwire {

inline std::string_view TextOf(const char* text) { return text == nullptr ? "" : text; }

// Copies the text and its NUL. InvalidArgument, in which it is called `what`, if the caller's room
// is too small.
absl::Status WriteText(const char* what, const std::string& text, char* room, size_t capacity);

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_C_TEXT_H_
