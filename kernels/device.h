// The devices that this build supports.
#ifndef THINWIRE_KERNELS_DEVICE_H_
#define THINWIRE_KERNELS_DEVICE_H_

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "compress/device.h"
#include "kernels/device_api.h"

namespace thinwire {

// A device of `api` (which must outlive it), whose name for users is `name`.
std::shared_ptr<Device> MakeDevice(const kernels::DeviceApi& api, int ordinal, std::string name);

// The table of libthinwire_cuda.so: of the file `library`, or if that is empty, of the one beside
// this library. Unimplemented names in one sentence what is missing.
absl::StatusOr<const kernels::DeviceApi*> LoadCuda(const std::string& library);

// `name` is "cuda" (the first one) or "cuda:N". Unimplemented if there is no such device or no
// library for it, InvalidArgument for another name.
absl::StatusOr<std::shared_ptr<Device>> OpenDevice(std::string_view name,
                                                   const std::string& library);

// The number of devices; Unimplemented if OpenDevice can't open any. The message for a driver that
// is missing, or too old for the library's CUDA runtime, names the version that is required.
absl::StatusOr<int> CountDevices(const std::string& library);
absl::StatusOr<int> CountDevices(const kernels::DeviceApi& api);

}  // namespace thinwire

#endif  // THINWIRE_KERNELS_DEVICE_H_
