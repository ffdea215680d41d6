// The Rehearsal of compress/device.h: the launches of a DeviceBackend, counted and not run.
#ifndef THINWIRE_KERNELS_REHEARSAL_H_
#define THINWIRE_KERNELS_REHEARSAL_H_

#include <memory>

#include "compress/device.h"

namespace thinwire::kernels {

std::unique_ptr<Rehearsal> NewRehearsal();

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_REHEARSAL_H_
