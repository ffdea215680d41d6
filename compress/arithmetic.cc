#include "compress/arithmetic.h"

#include <algorithm>

namespace thinwire {
namespace {

// Stage by stage, so that what is not zero is found early.
bool AllZero(std::span<const float> values) {
  constexpr size_t kStage = 1024;
  for (size_t begin = 0; begin < values.size(); begin += kStage) {
    bool zero = true;
    for (const float value : values.subspan(begin, std::min(kStage, values.size() - begin))) {
      zero &= value == 0.0f;
    }
    if (!zero) return false;
  }
  return true;
}

}  // namespace

bool Arithmetic::AreZero(std::span<const std::span<const float>> parts, float* known) const {
  if (known != nullptr && *known != 0.0f) return true;
  if (!std::all_of(parts.begin(), parts.end(), AllZero)) return false;
  if (known != nullptr) *known = 1.0f;
  return true;
}

}  // namespace thinwire
