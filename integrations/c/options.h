// Conversion of tw_options into the engine's Options.
#ifndef THINWIRE_INTEGRATIONS_C_OPTIONS_H_
#define THINWIRE_INTEGRATIONS_C_OPTIONS_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "integrations/c/thinwire.h"
#include "schedule/options.h"

namespace thinwire {

// Structs of thinwire.h that begin with struct_size come from callers who may have been compiled
// against an older, shorter struct or a newer, longer one. These functions copy the fields that the
// caller has into a struct of this library's size; the other fields are zero, their default. They
// return InvalidArgument for a size that no release has had, and for a longer struct that sets a
// field which this library does not know.
absl::StatusOr<tw_options> ReadOptions(const tw_options* caller);
absl::StatusOr<tw_simulation> ReadSimulation(const tw_simulation* caller);
absl::StatusOr<tw_kv_options> ReadKvOptions(const tw_kv_options* caller);

// The size of tw_options in the first release.
inline constexpr size_t kFirstOptionsSize = offsetof(tw_options, flight_path);

// InvalidArgument for an unknown codec, policy or transport.
absl::StatusOr<Options> ParseOptions(const tw_options& in);

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_C_OPTIONS_H_
