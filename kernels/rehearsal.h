// The Rehearsal of compress/device.h: the launches of a DeviceBackend, measured and not run. Their
// kernels' code is loaded: a first launch would load it, and may wait for kernels that run, which
// may wait for peers.
#ifndef THINWIRE_KERNELS_REHEARSAL_H_
#define THINWIRE_KERNELS_REHEARSAL_H_

#include <memory>

#include "compress/device.h"
#include "kernels/device_api.h"

namespace thinwire::kernels {

// `api` outlives it.
std::unique_ptr<Rehearsal> NewRehearsal(const DeviceApi& api, int ordinal);

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_REHEARSAL_H_
