#include "compress/float_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace thinwire {
namespace {

// Copies from and to a device are rare (a layout changes, a checkpoint is made), so each pins its
// own memory.
absl::StatusOr<DeviceMemory> Pin(Device& device, size_t count) {
  return device.AllocatePinned(std::max<size_t>(count, 1) * sizeof(float));
}

constexpr size_t kHugePage = size_t{2} << 20;

// A step reads and writes all of a residual. On huge pages the processor looks up addresses less
// often, and its prefetcher does not stop every 4 KiB. Kernels that have none to give, or were not
// told to, take no notice.
std::shared_ptr<float[]> OnHugePages(size_t bytes) {
  const size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* const memory = std::aligned_alloc(kHugePage, whole);
  if (memory == nullptr) throw std::bad_alloc();
  madvise(memory, whole, MADV_HUGEPAGE);
  return {static_cast<float*>(memory), [](float* floats) { std::free(floats); }};
}

std::shared_ptr<float[]> OnHost(size_t count) {
  const size_t bytes = count * sizeof(float);
  return bytes < kHugePage ? std::make_shared<float[]>(count) : OnHugePages(bytes);
}

std::chrono::steady_clock::time_point Patience() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(30);
}

}  // namespace

absl::StatusOr<std::shared_ptr<float[]>> FloatMemory::Allocate(size_t count) const {
  if (!on_device()) return OnHost(count);
  absl::StatusOr<DeviceMemory> memory =
      device_->Allocate(std::max<size_t>(count, 1) * sizeof(float));
  if (!memory.ok()) return memory.status();
  return std::shared_ptr<float[]>(*memory, reinterpret_cast<float*>(memory->get()));
}

absl::Status FloatMemory::Read(const float* from, const Fence* after, std::span<float> to) const {
  if (!on_device()) {
    std::copy_n(from, to.size(), to.data());
    return absl::OkStatus();
  }
  const absl::StatusOr<DeviceMemory> pinned = Pin(*device_, to.size());
  if (!pinned.ok()) return pinned.status();
  const absl::StatusOr<std::unique_ptr<DeviceStream>> stream = device_->MakeStream();
  if (!stream.ok()) return stream.status();
  if (after != nullptr) after->HoldBack(**stream);
  (*stream)->Copy(pinned->get(), from, to.size_bytes());
  if (absl::Status status = (*stream)->Synchronize(Patience()); !status.ok()) return status;
  if (!to.empty()) std::memcpy(to.data(), pinned->get(), to.size_bytes());
  return absl::OkStatus();
}

absl::Status FloatMemory::Write(std::span<const float> from, float* to) const {
  if (!on_device()) {
    std::copy(from.begin(), from.end(), to);
    return absl::OkStatus();
  }
  const absl::StatusOr<DeviceMemory> pinned = Pin(*device_, from.size());
  if (!pinned.ok()) return pinned.status();
  const absl::StatusOr<std::unique_ptr<DeviceStream>> stream = device_->MakeStream();
  if (!stream.ok()) return stream.status();
  if (!from.empty()) std::memcpy(pinned->get(), from.data(), from.size_bytes());
  (*stream)->Copy(to, pinned->get(), from.size_bytes());
  return (*stream)->Synchronize(Patience());
}

}  // namespace thinwire
