// Loads libthinwire_cuda.so when a device is requested, so that libthinwire.so needs no CUDA.
#include <dlfcn.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "kernels/device.h"

namespace thinwire {
namespace {

constexpr char kFileName[] = "libthinwire_cuda.so";

// In the folder of the library that contains this function.
std::string DefaultPath() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&DefaultPath), &info) == 0) return kFileName;
  return std::filesystem::path(info.dli_fname).replace_filename(kFileName).string();
}

}  // namespace

// It stays loaded: a process that has used a driver's library can't safely unload it.
absl::StatusOr<const kernels::DeviceApi*> LoadCuda(const std::string& library) {
  const std::string path = library.empty() ? DefaultPath() : library;
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("the CUDA part does not load (", dlerror(),
                     "): install thinwire with it, or keep gradients in host memory"));
  }
  using Function = const kernels::DeviceApi* (*)();
  const auto function = reinterpret_cast<Function>(dlsym(handle, kernels::kDeviceApiSymbol));
  const kernels::DeviceApi* api = function == nullptr ? nullptr : function();
  if (api == nullptr || api->version != kernels::kDeviceApiVersion) {
    return absl::UnimplementedError(
        absl::StrCat(path, " belongs to another version of thinwire: expected interface ",
                     kernels::kDeviceApiVersion, ", got ", api == nullptr ? 0 : api->version,
                     "; install both from one build"));
  }
  return api;
}

}  // namespace thinwire
