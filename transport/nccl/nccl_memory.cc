#include "transport/nccl/nccl_memory.h"

#include <cstdint>
#include <utility>

namespace thinwire {

absl::StatusOr<DeviceMemory> AllocateRegistered(std::shared_ptr<NcclDriver> driver, size_t bytes) {
  if (!driver->comm().nccl().registers()) {
    return absl::UnimplementedError("NCCL registers memory from version 2.19 on");
  }
  const absl::StatusOr<void*> memory = driver->comm().Allocate(bytes);
  if (!memory.ok()) return memory.status();
  absl::StatusOr<void*> registration = nullptr;
  if (!driver->Do([&](NcclComm& comm) { registration = comm.Register(*memory, bytes); })) {
    registration = driver->failure()->reason();
  } else if (registration.ok() && *registration == nullptr) {
    registration = absl::UnimplementedError("NCCL was set to register no memory");
  }
  if (!registration.ok()) {
    driver->comm().Free(*memory);
    return registration.status();
  }
  return DeviceMemory(static_cast<uint8_t*>(*memory),
                      [driver = std::move(driver), registration = *registration](uint8_t* memory) {
                        const bool lives =
                            driver->Do([&](NcclComm& comm) { comm.Deregister(registration); });
                        // Freeing waits for the device, and a kernel that does not end may write.
                        if (lives || driver->comm().AwaitEnd()) driver->comm().Free(memory);
                      });
}

}  // namespace thinwire
