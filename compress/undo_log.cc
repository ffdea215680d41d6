#include "compress/undo_log.h"

#include <algorithm>

#include "compress/stream_copy.h"

namespace thinwire {
namespace {

// Overwrites the ranges of `to` with those of `from`, by way of the host: it happens once a
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

void UndoLog::Begin() {
  const absl::MutexLock lock(&mu_);
  residuals_saved_.clear();
  for (std::vector<Range>& saved : arrays_saved_) saved.clear();
}

void UndoLog::Save(const Arithmetic& arithmetic, Range elements, const float* residual,
                   std::span<const float* const> arrays) {
  const auto copy = [&](float* to, const float* from) {
    if (from == nullptr) return;
    const size_t count = elements.end - elements.begin;
    if (on_device_) {
      arithmetic.Copy(to + elements.begin, from + elements.begin, count * sizeof(float));
    } else {
      StreamCopy(to + elements.begin, from + elements.begin, count);
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
