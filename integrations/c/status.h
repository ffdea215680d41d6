// The border: absl::Status becomes a tw_status and a message, here and nowhere else.
#ifndef THINWIRE_INTEGRATIONS_C_STATUS_H_
#define THINWIRE_INTEGRATIONS_C_STATUS_H_

#include <string_view>

#include "absl/status/status.h"
#include "integrations/c/thinwire.h"

namespace thinwire {

// Keeps the message for tw_last_error of this thread and returns the code.
tw_status ToC(const absl::Status& status);

const char* LastError();

// The way back, for a reason that comes from the caller. A number that is no status is Internal.
absl::Status FromC(tw_status status, std::string_view message);

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_C_STATUS_H_
