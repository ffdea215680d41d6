// A second unique id inside the first. Ranks that want to compress first have to agree on it, and
// can't do so over the program's communicator: a rank that has no shim would take part in something
// else, and NCCL would hang. So they meet in a communicator of their own, whose unique id travels
// in the bytes of the program's that NCCL does not read. A rank that does not come is late, and
// nothing worse.
#ifndef THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_TWIN_ID_H_
#define THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_TWIN_ID_H_

#include <optional>

#include "absl/status/status.h"
#include "integrations/nccl_shim/nccl_next.h"

namespace thinwire {

// Asks NCCL for another id, and puts it into `id`, which it has made just before. Unimplemented,
// and `id` as it was, if this NCCL leaves no room.
absl::Status AttachTwin(const NcclNext& nccl, NcclUniqueId* id);

// The id that was put there, on whatever rank; nothing if there is none.
std::optional<NcclUniqueId> TwinOf(const NcclUniqueId& id);

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_TWIN_ID_H_
