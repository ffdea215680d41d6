#include "compress/stream_copy.h"

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

// One instruction set for all machines, which the compiler must be told of on NEON.
HWY_BEFORE_NAMESPACE();
namespace thinwire {

void StreamCopy(float* to, const float* from, size_t count) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::FixedTag<float, 4> four;
  constexpr size_t kAlign = 4 * sizeof(float);
  const size_t beyond = reinterpret_cast<uintptr_t>(to) % kAlign;
  const size_t head = std::min(count, (kAlign - beyond) % kAlign / sizeof(float));
  std::copy_n(from, head, to);
  size_t i = head;
  for (; i + 4 <= count; i += 4) hn::Stream(hn::LoadU(four, from + i), four, to + i);
  hwy::FlushStream();
  std::copy(from + i, from + count, to + i);
}

}  // namespace thinwire
HWY_AFTER_NAMESPACE();
