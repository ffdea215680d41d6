// The Rehearsal of compress/device.h: the launches of a DeviceBackend, measured but not run. It
// loads their kernels' code: otherwise the first launch would, and might wait for running kernels,
// which may wait for peers.
#ifndef THINWIRE_KERNELS_REHEARSAL_H_
#define THINWIRE_KERNELS_REHEARSAL_H_

#include <memory>

#include "compress/device.h"
#include "kernels/device_api.h"

namespace thinwire::kernels {

// `api` must outlive it.
std::unique_ptr<Rehearsal> NewRehearsal(const DeviceApi& api, int ordinal);

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_REHEARSAL_H_
