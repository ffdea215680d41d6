// Checks of options and bucket descriptions that need no peer.
#ifndef THINWIRE_SCHEDULE_ENGINE_CHECKS_H_
#define THINWIRE_SCHEDULE_ENGINE_CHECKS_H_

#include "absl/status/status.h"
#include "compress/device.h"
#include "schedule/options.h"
#include "schedule/request.h"
#include "transport/membership.h"

namespace thinwire {

// Unimplemented if the device lacks kernels for these codecs.
absl::Status CheckKernels(const Options& options, const Device& device);

absl::Status CheckBucket(const BucketRequest& request, const Membership& members,
                         const Options& options);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_CHECKS_H_
