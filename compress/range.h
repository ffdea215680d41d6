// Range: a stretch of a bucket's elements.
#ifndef THINWIRE_COMPRESS_RANGE_H_
#define THINWIRE_COMPRESS_RANGE_H_

#include <cstddef>

namespace thinwire {

// Elements [begin, end) of a bucket.
struct Range {
  size_t begin = 0;
  size_t end = 0;
  friend bool operator==(const Range&, const Range&) = default;
};

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_RANGE_H_
