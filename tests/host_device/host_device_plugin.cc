// The device of host_device.h in place of libthinwire_cuda.so, for tests of the code that loads it.
#include "tests/host_device/host_device.h"

extern "C" __attribute__((visibility("default"))) const thinwire::kernels::DeviceApi*
tw_cuda_api() {
  return &thinwire::kernels::HostDeviceApi();
}

// For other stand-ins whose kernels run on this device's streams.
extern "C" __attribute__((visibility("default"))) void tw_host_device_queue(
    void* stream, void (*work)(void* argument), void* argument) {
  thinwire::kernels::QueueOnHostDevice(stream, [=] { work(argument); });
}
