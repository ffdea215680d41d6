// C strings of callers, of which null means empty.
#ifndef THINWIRE_INTEGRATIONS_C_TEXT_H_
#define THINWIRE_INTEGRATIONS_C_TEXT_H_

#include <string_view>

namespace thinwire {

inline std::string_view TextOf(const char* text) { return text == nullptr ? "" : text; }

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_C_TEXT_H_
