// Tests that run on every instruction set and compare bits.
#ifndef THINWIRE_TESTS_COMPRESS_TARGET_TEST_H_
#define THINWIRE_TESTS_COMPRESS_TARGET_TEST_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "compress/backend.h"
#include "compress/element_math.h"

namespace thinwire {

inline constexpr uint64_t kSeed = 20240607;

inline CodecSpec Spec(const std::string& text) { return *CodecSpec::Parse(text); }

inline bool SameBits(const void* a, const void* b, size_t bytes) {
  return bytes == 0 || std::memcmp(a, b, bytes) == 0;
}

// NaNs may differ in their payload; all other values must have the same bits.
inline void ExpectSameFloats(const float* got, const float* want, size_t n,
                             const std::string& what) {
  for (size_t i = 0; i < n; ++i) {
    float a, b;
    std::memcpy(&a, got + i, 4);
    std::memcpy(&b, want + i, 4);
    if (std::isnan(a) && std::isnan(b)) continue;
    ASSERT_EQ(BitsOf(a), BitsOf(b)) << what << ", element " << i << ": " << a << " against " << b;
  }
}

// The parameter is the name of an instruction set, as SimdTargets lists it.
class TargetTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ForceSimdTarget(GetParam()); }
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_COMPRESS_TARGET_TEST_H_
