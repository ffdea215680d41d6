#include "schedule/collective/absence.h"

#include <algorithm>

namespace thinwire {

void Absence::Add(std::span<const Range> ranges, std::span<float> kept, Scratch& scratch) {
  for (const Range& range : ranges) {
    const size_t count = range.end - range.begin;
    held_.push_back({kept.subspan(range.begin, count), scratch.TakeOf<float>(count)});
  }
}

// Every backend has sums: -1 * kept + aside is 0, and 1 * kept + aside is what it was.
void Absence::SetAside(const Arithmetic& arithmetic) {
  aside_ = true;
  for (const Held& held : held_) {
    arithmetic.Copy(held.aside.data(), held.kept.data(), held.kept.size_bytes());
    arithmetic.Accumulate({held.aside.data(), held.aside.size()}, -1.0f, held.kept, held.kept);
  }
}

void Absence::Restore(const Arithmetic& arithmetic) {
  if (!aside_) return;
  aside_ = false;
  for (const Held& held : held_) {
    arithmetic.Accumulate({held.aside.data(), held.aside.size()}, 1.0f, held.kept, held.kept);
  }
}

std::vector<Range> Overlap(std::span<const Range> ranges, Range within, Range without) {
  std::vector<Range> parts;
  const auto add = [&](size_t begin, size_t end) {
    if (begin < end) parts.push_back({begin - within.begin, end - within.begin});
  };
  for (const Range& range : ranges) {
    const size_t begin = std::max(range.begin, within.begin);
    const size_t end = std::min(range.end, within.end);
    add(begin, std::min(end, std::max(begin, without.begin)));
    add(std::max(begin, without.end), end);
  }
  return parts;
}

}  // namespace thinwire
