#include "kernels/cuda_contexts.h"

#include <cuda.h>
#include <dlfcn.h>

#include <array>
#include <atomic>

namespace thinwire::kernels {
namespace {

// The driver's library belongs to the machine, so nothing links to it. CUDA's run-time library has
// loaded the same file.
struct Driver {
  CUresult (*init)(unsigned) = nullptr;
  CUresult (*device)(CUdevice*, int) = nullptr;
  CUresult (*retain)(CUcontext*, CUdevice) = nullptr;
  CUresult (*current)(CUcontext*) = nullptr;
  CUresult (*push)(CUcontext) = nullptr;
  CUresult (*pop)(CUcontext*) = nullptr;
  CUresult status = CUDA_ERROR_STUB_LIBRARY;
};

Driver LoadDriver() {
  Driver driver;
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return driver;
  bool complete = true;
  const auto find = [&](auto* function, const char* name) {
    *reinterpret_cast<void**>(function) = dlsym(library, name);
    complete = complete && *function != nullptr;
  };
  find(&driver.init, "cuInit");
  find(&driver.device, "cuDeviceGet");
  find(&driver.retain, "cuDevicePrimaryCtxRetain");
  find(&driver.current, "cuCtxGetCurrent");
  find(&driver.push, "cuCtxPushCurrent_v2");
  find(&driver.pop, "cuCtxPopCurrent_v2");
  if (complete) driver.status = driver.init(0);
  return driver;
}

const Driver& TheDriver() {
  static const Driver driver = LoadDriver();
  return driver;
}

constexpr int kMostDevices = 64;

// Retained once and never released, since memory and streams in it live until the process ends.
int Primary(int ordinal, void** context) {
  static std::array<std::atomic<CUcontext>, kMostDevices> known;
  const Driver& driver = TheDriver();
  if (driver.status != CUDA_SUCCESS) return driver.status;
  if (ordinal < 0 || ordinal >= kMostDevices) return CUDA_ERROR_INVALID_DEVICE;
  CUcontext primary = known[ordinal];
  if (primary == nullptr) {
    CUdevice device;
    if (const CUresult error = driver.device(&device, ordinal); error != CUDA_SUCCESS) return error;
    if (const CUresult error = driver.retain(&primary, device); error != CUDA_SUCCESS) return error;
    known[ordinal] = primary;
  }
  *context = primary;
  return CUDA_SUCCESS;
}

int Current(void** context) { return TheDriver().current(reinterpret_cast<CUcontext*>(context)); }
int Push(void* context) { return TheDriver().push(static_cast<CUcontext>(context)); }
int Pop(void** context) { return TheDriver().pop(reinterpret_cast<CUcontext*>(context)); }

}  // namespace

const ContextCalls& DriverContextCalls() {
  static constexpr ContextCalls kCalls = {
      .primary = Primary, .current = Current, .push = Push, .pop = Pop};
  return kCalls;
}

}  // namespace thinwire::kernels
