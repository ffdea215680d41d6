// The device of host_device.h in the place of libthinwire_cuda.so: for tests of what loads it.
#include "kernels/host_device.h"

extern "C" __attribute__((visibility("default"))) const thinwire::kernels::DeviceApi*
tw_cuda_api() {
  return &thinwire::kernels::HostDeviceApi();
}
