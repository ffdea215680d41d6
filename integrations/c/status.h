// The border: calls are checked, and absl::Status becomes a tw_status and a message, here and
// nowhere else.
#ifndef THINWIRE_INTEGRATIONS_C_STATUS_H_
#define THINWIRE_INTEGRATIONS_C_STATUS_H_

#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "integrations/c/thinwire.h"

namespace thinwire {

// Keeps the message for tw_last_error of this thread and returns the code.
tw_status ToC(const absl::Status& status);

const char* LastError();

// The way back, for a reason that comes from the caller. A number that is no status is Internal.
absl::Status FromC(tw_status status, std::string_view message);

// C strings: of callers, of which null means empty, and for callers.
inline std::string_view TextOf(const char* text) { return text == nullptr ? "" : text; }

// Copies the text and its NUL. InvalidArgument, in which it is called `what`, if the caller's room
// is too small.
absl::Status WriteText(const char* what, const std::string& text, char* room, size_t capacity);

// InvalidArgument if `function` got a null pointer, or in a child that was forked from the process
// of the communicator.
absl::Status CheckComm(const char* function, const tw_comm* comm,
                       std::initializer_list<const void*> pointers = {});

// The same for a collective, and for its dtype, op and stream.
absl::Status CheckCall(const tw_comm* comm, tw_dtype dtype, tw_op op, const void* stream);

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_C_STATUS_H_
