// The border: absl::Status becomes a tw_status and a message, here and nowhere else.
#ifndef THINWIRE_INTEGRATIONS_C_STATUS_H_
#define THINWIRE_INTEGRATIONS_C_STATUS_H_

#include "absl/status/status.h"
#include "integrations/c/thinwire.h"

namespace thinwire {

// Keeps the message for tw_last_error of this thread and returns the code.
tw_status ToC(const absl::Status& status);

const char* LastError();

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_C_STATUS_H_
