// FloatMemory: arrays of floats on the host or on a device, and copies from and to them.
#ifndef THINWIRE_COMPRESS_FLOAT_MEMORY_H_
#define THINWIRE_COMPRESS_FLOAT_MEMORY_H_

#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/device.h"

namespace thinwire {

class FloatMemory {
 public:
  FloatMemory() = default;  // the host's
  explicit FloatMemory(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  bool on_device() const { return device_ != nullptr; }

  // Its content is whatever it was.
  absl::StatusOr<std::shared_ptr<float[]>> Allocate(size_t count) const;

  // Both wait until it is done. Read comes after the fence, which may be null.
  absl::Status Read(const float* from, const Fence* after, std::span<float> to) const;
  absl::Status Write(std::span<const float> from, float* to) const;

 private:
  std::shared_ptr<Device> device_;
};

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_FLOAT_MEMORY_H_
