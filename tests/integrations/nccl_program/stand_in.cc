// The few GPU runtime calls that the program makes, on devices made of CPU threads. These are the
// devices of libthinwire_host_device_plugin.so, which the shim uses as well.
#include <sched.h>

#include <cstddef>

#include "kernels/device_api.h"

extern "C" const thinwire::kernels::DeviceApi* tw_cuda_api();

#define THINWIRE_STAND_IN extern "C" __attribute__((visibility("default")))

THINWIRE_STAND_IN void* standInAllocate(int device, size_t bytes) {
  void* memory = nullptr;
  tw_cuda_api()->allocate(device, bytes, &memory);
  return memory;
}

THINWIRE_STAND_IN void standInFree(int device, void* memory) {
  tw_cuda_api()->release(device, memory);
}

THINWIRE_STAND_IN void* standInStream(int device) {
  void* stream = nullptr;
  tw_cuda_api()->make_stream(device, &stream);
  return stream;
}

THINWIRE_STAND_IN void standInCopy(int device, void* to, const void* from, size_t bytes,
                                   void* stream) {
  const thinwire::kernels::DeviceApi& api = *tw_cuda_api();
  void* event = nullptr;
  api.copy(device, to, from, bytes, stream);
  api.make_event(device, &event);
  api.record(device, event, stream);
  while (api.query(device, event) == thinwire::kernels::kBusy) sched_yield();
  api.destroy_event(device, event);
}
