// Disables instruction sets. Include it before hwy/foreach_target.h in every file that is compiled
// once per target.
#ifndef THINWIRE_COMPRESS_HIGHWAY_TARGETS_H_
#define THINWIRE_COMPRESS_HIGHWAY_TARGETS_H_

#include <hwy/detect_targets.h>

// AVX3_DL's TruncateTo is wrong in Highway 1.0.3, and its SVE targets do not compile here.
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)

#endif  // THINWIRE_COMPRESS_HIGHWAY_TARGETS_H_
