// The agreement of a communicator's ranks to compress, all of them and alike. All ranks hear of
// all, so all decide alike.
#ifndef THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_AGREEMENT_H_
#define THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_AGREEMENT_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/device.h"
#include "transport/planes.h"

namespace thinwire {

// The remains of an agreement, until the program ends its communicator: freeing memory, and
// ending a communicator of NCCL's, wait for all work of the device, other communicators' too, whose
// peers may be waiting in the same way.
struct AgreementRemains {
  std::unique_ptr<StreamPlane> plane;
  DeviceMemory rooms, host;
};

// Tells all ranks this rank's `terms`, or why it takes no part, and hears theirs, over a plane of
// `device`. OK if all take part on the same terms. Else Unimplemented names the first rank that
// takes no part, with its reason, FailedPrecondition the first whose terms are not rank 0's, both
// in the same words on every rank; DeadlineExceeded if ranks do not answer.
absl::Status AgreeOver(StreamPlane& plane, Device& device, const absl::StatusOr<std::string>& terms,
                       Deadline deadline, AgreementRemains* remains);

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_AGREEMENT_H_
