#include "compress/undo_log.h"

#include <algorithm>

#include "compress/stream_copy.h"

namespace thinwire {
namespace {

// Overwrites the ranges of `to` with those of `from`, by way of the host: it happens once a
// failure.
absl::Status CopyRanges(const FloatMemory& memory, const Fence* after,
                        std::span<const Range> ranges, const float* from, size_t numel, float* to) {
  if (from == nullptr || to == nullptr) return absl::OkStatus();
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
  saved_.clear();
}

void UndoLog::Save(const Backend& backend, Range elements, const float* residual,
                   const float* momentum) {
  const auto copy = [&](float* to, const float* from) {
    if (to == nullptr || from == nullptr) return;
    const size_t count = elements.end - elements.begin;
    if (on_device_) {
      backend.Copy(to + elements.begin, from + elements.begin, count * sizeof(float));
    } else {
      StreamCopy(to + elements.begin, from + elements.begin, count);
    }
  };
  copy(residual_.get(), residual);
  copy(momentum_.get(), momentum);
  const absl::MutexLock lock(&mu_);
  saved_.push_back(elements);
}

absl::Status UndoLog::Restore(const FloatMemory& memory, const Fence* after, size_t numel,
                              float* residual, float* momentum) {
  std::vector<Range> ranges;
  {
    const absl::MutexLock lock(&mu_);
    ranges.swap(saved_);
  }
  if (ranges.empty()) return absl::OkStatus();
  const absl::Status status = CopyRanges(memory, after, ranges, residual_.get(), numel, residual);
  if (!status.ok()) return status;
  return CopyRanges(memory, after, ranges, momentum_.get(), numel, momentum);
}

}  // namespace thinwire
