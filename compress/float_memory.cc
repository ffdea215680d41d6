#include "compress/float_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "compress/simd_kernels.h"

namespace thinwire {
namespace {

// Copies from and to a device are rare (when a layout changes or a checkpoint is made), so each
// allocates its own pinned memory.
absl::StatusOr<DeviceMemory> Pin(Device& device, size_t count) {
  return device.AllocatePinned(std::max<size_t>(count, 1) * sizeof(float));
}

constexpr size_t kHugePage = size_t{2} << 20;

// A step reads and writes a whole residual. With huge pages the processor translates addresses less
// often, and its prefetcher does not stop every 4 KiB. Kernels without huge pages, or with them
// turned off, ignore the request.
absl::StatusOr<std::shared_ptr<float[]>> OnHugePages(size_t bytes) {
  const size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* const memory = std::aligned_alloc(kHugePage, whole);
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the host has no memory for ", whole, " bytes of residuals or momentum; ",
                     "free some, or raise this process's limit (ulimit -v)"));
  }
  madvise(memory, whole, MADV_HUGEPAGE);
  return std::shared_ptr<float[]>(static_cast<float*>(memory),
                                  [](float* floats) { std::free(floats); });
}

absl::StatusOr<std::shared_ptr<float[]>> OnHost(size_t count) {
  const size_t bytes = count * sizeof(float);
  return bytes < kHugePage ? std::make_shared<float[]>(count) : OnHugePages(bytes);
}

std::chrono::steady_clock::time_point Patience() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(30);
}

// Overwrites the ranges of `to` with those of `from`, through the host: this happens once per
// failure.
absl::Status CopyRanges(const FloatMemory& memory, const Fence* after,
                        std::span<const Range> ranges, const float* from, size_t numel, float* to) {
  if (ranges.empty()) return absl::OkStatus();
  std::vector<float> before(numel), now(numel);
  absl::Status status = memory.Read(from, after, before);
  if (status.ok()) status = memory.Read(to, after, now);
  if (!status.ok()) return status;
  for (const Range& range : ranges) {
    std::copy(before.begin() + range.begin, before.begin() + range.end, now.begin() + range.begin);
  }
  return memory.Write(now, to);
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

void UndoLog::Begin() {
  const absl::MutexLock lock(&mu_);
  residuals_saved_.clear();
  for (std::vector<Range>& saved : arrays_saved_) saved.clear();
}

void UndoLog::Save(const Backend& backend, Range elements, const float* residual,
                   std::span<const float* const> arrays) {
  const auto copy = [&](float* to, const float* from) {
    if (from == nullptr) return;
    const size_t count = elements.end - elements.begin;
    if (on_device_) {
      backend.Copy(to + elements.begin, from + elements.begin, count * sizeof(float));
    } else {
      simd::StreamCopy(to + elements.begin, from + elements.begin, count);
    }
  };
  const size_t kept = std::min(arrays.size(), arrays_.size());
  copy(residual_.get(), residual);
  for (size_t i = 0; i < kept; ++i) copy(arrays_[i].get(), arrays[i]);
  const absl::MutexLock lock(&mu_);
  if (residual != nullptr) residuals_saved_.push_back(elements);
  for (size_t i = 0; i < kept; ++i) {
    if (arrays[i] != nullptr) arrays_saved_[i].push_back(elements);
  }
}

absl::Status UndoLog::Restore(const FloatMemory& memory, const Fence* after, size_t numel,
                              float* residual, const Arrays& arrays) {
  std::vector<Range> residuals;
  std::vector<std::vector<Range>> saved(arrays_.size());
  {
    const absl::MutexLock lock(&mu_);
    residuals.swap(residuals_saved_);
    saved.swap(arrays_saved_);
  }
  absl::Status status = CopyRanges(memory, after, residuals, residual_.get(), numel, residual);
  for (size_t i = 0; status.ok() && i < arrays_.size(); ++i) {
    status = CopyRanges(memory, after, saved[i], arrays_[i].get(), numel, arrays[i].get());
  }
  return status;
}

}  // namespace thinwire
