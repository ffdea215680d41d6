// tw_options as the engine's Options.
#ifndef THINWIRE_INTEGRATIONS_C_OPTIONS_H_
#define THINWIRE_INTEGRATIONS_C_OPTIONS_H_

#include "absl/status/statusor.h"
#include "integrations/c/thinwire.h"
#include "schedule/options.h"

namespace thinwire {

// InvalidArgument for a codec or policy that there is none of.
absl::StatusOr<Options> ParseOptions(const tw_options& in);

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_C_OPTIONS_H_
