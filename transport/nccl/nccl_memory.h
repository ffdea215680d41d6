// Memory that NCCL allocates and a communicator knows, so that blocks there go without copies to
// buffers of NCCL's own.
#ifndef THINWIRE_TRANSPORT_NCCL_NCCL_MEMORY_H_
#define THINWIRE_TRANSPORT_NCCL_NCCL_MEMORY_H_

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "compress/device.h"
#include "transport/nccl/nccl_driver.h"

namespace thinwire {

// It shares the driver, so that the communicator ends after all memory that it knows. NCCL's
// documentation forbids exchanges between memory that is registered and memory that is not: all
// ranks take this, or none.
//
// Unimplemented where the library is older than 2.19, or was set to register nothing
// (NCCL_LOCAL_REGISTER=0); ResourceExhausted; Internal if NCCL refuses it.
absl::StatusOr<DeviceMemory> AllocateRegistered(std::shared_ptr<NcclDriver> driver, size_t bytes);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_NCCL_NCCL_MEMORY_H_
