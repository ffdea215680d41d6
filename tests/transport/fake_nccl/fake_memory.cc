// Functions that NCCL has since 2.19. A fake without this file is an older NCCL.
#include <cstddef>

#include "tests/transport/fake_nccl/fake_communicator.h"
#include "tests/transport/fake_nccl/fake_registry.h"

#define THINWIRE_FAKE extern "C" __attribute__((visibility("default")))

using namespace thinwire;  // NOLINT: all that follows is another library's interface

namespace {

NcclResult Misuse() {
  ++FakeControls().misuses;
  return kNcclInvalidUsage;
}

}  // namespace

THINWIRE_FAKE NcclResult ncclMemAlloc(void** memory, size_t bytes) {
  *memory = TheFakeRegistry().Allocate(bytes, FakeControls().most_bytes);
  if (*memory == nullptr) return kNcclCudaError;
  ++FakeControls().allocated;
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclMemFree(void* memory) {
  FakeAwaitDevice();
  if (!TheFakeRegistry().Free(memory)) return Misuse();
  ++FakeControls().freed;
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclCommRegister(NcclHandle handle, void* memory, size_t bytes,
                                          void** registration) {
  FakeCall comm(handle);
  *registration = nullptr;
  if (FakeControls().registers_nothing != 0) return kNcclOk;
  if (FakeControls().refuses_to_register == comm->rank) return kNcclSystemError;
  if (comm->in_progress) return Misuse();
  if (!TheFakeRegistry().Register(&*comm, memory, bytes, registration)) return Misuse();
  ++FakeControls().registered;
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclCommDeregister(NcclHandle handle, void* registration) {
  FakeCall comm(handle);
  if (!TheFakeRegistry().Deregister(&*comm, registration)) return Misuse();
  ++FakeControls().deregistered;
  return kNcclOk;
}
