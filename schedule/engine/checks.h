// Checks of what callers give, which need no peer.
#ifndef THINWIRE_SCHEDULE_ENGINE_CHECKS_H_
#define THINWIRE_SCHEDULE_ENGINE_CHECKS_H_

#include <string>

#include "absl/status/status.h"
#include "compress/device.h"
#include "schedule/engine/tensors.h"
#include "schedule/options.h"
#include "schedule/request.h"
#include "transport/membership.h"

namespace thinwire {

// The output's elements of a collective whose input has `numel`.
size_t OutputNumel(Collective collective, size_t numel, int size);

// Unimplemented if the device lacks kernels for these codecs.
absl::Status CheckKernels(const Options& options, const Device& device);

absl::Status CheckBucket(const BucketRequest& request, const Membership& members,
                         const Options& options);

// `device` is null for the host.
absl::Status CheckSubmission(const Submission& submission, const Bucket& bucket,
                             const Membership& members, const Device* device);

// A captured call does not run now, and its replays would exchange nothing: InvalidArgument. `what`
// names the tensor.
absl::Status CheckNotCaptured(DeviceStream& stream, const std::string& what);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_CHECKS_H_
