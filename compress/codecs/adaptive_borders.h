// What adaptive's levels give at compile time: the borders between them in the encoder's whole
// numbers, and short cuts to the right one of many.
#ifndef THINWIRE_COMPRESS_CODECS_ADAPTIVE_BORDERS_H_
#define THINWIRE_COMPRESS_CODECS_ADAPTIVE_BORDERS_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "compress/codecs/adaptive.h"
#include "compress/codecs/adaptive_levels.h"

namespace thinwire::codecs {

// The magnitudes of a width's levels.
template <int kWidth>
inline constexpr size_t kLevelCount = size_t{1} << (kWidth - 1);
template <int kWidth>
constexpr int LevelAt(size_t index) {
  return kAdaptiveLevels[kLevelCount<kWidth> - 1 + index];
}

// A magnitude above border i lies nearer to level i + 1 than to level i; there is none behind the
// last level.
template <int kWidth>
constexpr std::array<int16_t, kLevelCount<kWidth>> MakeBorders() {
  std::array<int16_t, kLevelCount<kWidth>> borders{};
  for (size_t i = 0; i + 1 < borders.size(); ++i) {
    borders[i] = static_cast<int16_t>((LevelAt<kWidth>(i) + LevelAt<kWidth>(i + 1)) *
                                      (8 * kHeadUnits) / (kWidth <= kNarrowWidth ? 32 : 256));
  }
  borders.back() = INT16_MAX;
  return borders;
}
template <int kWidth>
inline constexpr auto kBorders = MakeBorders<kWidth>();

// Magnitudes in cells of 16: where many levels are, a cell's magnitudes have passed `start`
// borders, or one more.
inline constexpr int kCell = 16;
inline constexpr size_t kCells = 560;

template <int kWidth>
constexpr std::array<uint8_t, kCells> MakeStarts() {
  std::array<uint8_t, kCells> starts{};
  for (size_t cell = 0; cell < kCells; ++cell) {
    uint8_t passed = 0;
    while (kBorders<kWidth>[passed] < static_cast<int>(cell) * kCell) ++passed;
    starts[cell] = passed;
  }
  return starts;
}
template <int kWidth>
inline constexpr auto kStarts = MakeStarts<kWidth>();

template <int kWidth>
constexpr bool CellsSuffice() {
  size_t last = 0;
  for (size_t i = 1; i + 1 < kBorders<kWidth>.size(); ++i) {
    if (kBorders<kWidth>[i] - kBorders<kWidth>[i - 1] < kCell) return false;
    last = i;
  }
  return kBorders<kWidth>[last] < static_cast<int>(kCells - 1) * kCell;
}
static_assert(CellsSuffice<6>() && CellsSuffice<7>() && CellsSuffice<8>());

// The number of borders passed.
template <int kWidth>
inline uint8_t IndexOf(int magnitude) {
  const size_t cell = static_cast<size_t>(magnitude) / kCell;
  const uint8_t start = kStarts<kWidth>[cell < kCells ? cell : kCells - 1];
  return static_cast<uint8_t>(start + (magnitude > kBorders<kWidth>[start] ? 1 : 0));
}

}  // namespace thinwire::codecs

#endif  // THINWIRE_COMPRESS_CODECS_ADAPTIVE_BORDERS_H_
