// How many elements a tensor may have.
#ifndef THINWIRE_COMPRESS_ELEMENT_LIMIT_H_
#define THINWIRE_COMPRESS_ELEMENT_LIMIT_H_

#include <cstddef>

#include "absl/status/status.h"

namespace thinwire {

// More is a caller's mistake, and sizes in bits would overflow.
inline constexpr size_t kMostElements = size_t{1} << 40;

// InvalidArgument if there are more.
absl::Status CheckElements(size_t numel);

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_ELEMENT_LIMIT_H_
