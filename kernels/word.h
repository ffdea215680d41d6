// Loads or stores a few bytes at once.
#ifndef THINWIRE_KERNELS_WORD_H_
#define THINWIRE_KERNELS_WORD_H_

#include <cstring>

#include "compress/element_math.h"

namespace thinwire::kernels {

// Both ends must be aligned to kBytes: that makes it one instruction.
template <unsigned kBytes>
THINWIRE_HD void CopyWord(void* to, const void* from) {
  memcpy(__builtin_assume_aligned(to, kBytes), __builtin_assume_aligned(from, kBytes), kBytes);
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_WORD_H_
