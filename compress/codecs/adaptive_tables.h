// Tables that are computed from adaptive's levels at compile time: the borders between levels, in
// the encoder's integers, as the loops of adaptive_codes-inl.h look them up.
#ifndef THINWIRE_COMPRESS_CODECS_ADAPTIVE_TABLES_H_
#define THINWIRE_COMPRESS_CODECS_ADAPTIVE_TABLES_H_

#include <cstddef>
#include <cstdint>

#include "compress/codecs/adaptive.h"
#include "compress/codecs/adaptive_levels.h"

namespace thinwire::codecs {

// The magnitudes of a width's levels.
constexpr size_t LevelCount(int width) { return size_t{1} << (width - 1); }
constexpr const uint16_t* LevelsOf(int width) { return kAdaptiveLevels + LevelCount(width) - 1; }

// A magnitude above border i is nearer to level i + 1 than to level i.
constexpr int16_t BorderAt(int width, size_t i) {
  return static_cast<int16_t>(HalfWay(LevelsOf(width)[i], LevelsOf(width)[i + 1], width));
}

// A narrow width's index is found from its highest bit down. Bit 3 of a key is the index's highest
// bit, for every width, and the key's other bits are 0 until they are found, so that one loop
// serves all widths: step s compares with border[s][key / 2] and adds 8 >> s to the key.
inline constexpr int kKeyBits = kNarrowWidth - 1;
struct NarrowTable {
  alignas(16) int16_t border[kKeyBits][8] = {};
  alignas(16) uint8_t level[1 << kKeyBits] = {};  // by key
};

constexpr NarrowTable MakeNarrowTable(int width) {
  NarrowTable table;
  const int bits = width - 1;
  for (int step = 0; step < bits; ++step) {
    for (size_t prefix = 0; prefix < size_t{1} << step; ++prefix) {
      const size_t first_above = (2 * prefix + 1) << (bits - 1 - step);
      table.border[step][prefix << (kKeyBits - 1 - step)] = BorderAt(width, first_above - 1);
    }
  }
  for (size_t i = 0; i < LevelCount(width); ++i) {
    table.level[i << (kKeyBits - bits)] = static_cast<uint8_t>(LevelsOf(width)[i]);
  }
  return table;
}

inline constexpr NarrowTable kNarrowTables[kNarrowWidth] = {MakeNarrowTable(1), MakeNarrowTable(2),
                                                            MakeNarrowTable(3), MakeNarrowTable(4),
                                                            MakeNarrowTable(5)};

// For wide codes, magnitudes are grouped in cells of 16: those of a cell have passed `start`
// borders, or one more.
inline constexpr int kCell = 16;
inline constexpr size_t kCells = 560;
struct WideTable {
  int16_t border[128] = {};  // nothing passes the border after the last level
  uint8_t start[kCells] = {};

  // The number of borders passed.
  uint8_t IndexOf(int magnitude) const {
    const size_t cell = static_cast<size_t>(magnitude) / kCell;
    const uint8_t first = start[cell < kCells ? cell : kCells - 1];
    return static_cast<uint8_t>(first + (magnitude > border[first] ? 1 : 0));
  }
};

constexpr WideTable MakeWideTable(int width) {
  WideTable table;
  const size_t count = LevelCount(width);
  for (size_t i = 0; i + 1 < count; ++i) table.border[i] = BorderAt(width, i);
  table.border[count - 1] = INT16_MAX;
  for (size_t cell = 0; cell < kCells; ++cell) {
    uint8_t passed = cell == 0 ? uint8_t{0} : table.start[cell - 1];
    while (table.border[passed] < static_cast<int>(cell) * kCell) ++passed;
    table.start[cell] = passed;
  }
  return table;
}

inline constexpr WideTable kWideTables[kMaxWidth - kNarrowWidth] = {
    MakeWideTable(6), MakeWideTable(7), MakeWideTable(8)};

// The levels of all codes of a width, with their signs, in two parts that each fit in a byte, so
// that sums of 256 fit in 16 bits. The coarse part, in units of 16, is the upper byte.
inline constexpr int kFineBits = 4;
struct SplitLevels {
  int16_t at[256] = {};
};

constexpr SplitLevels MakeSplitLevels(int width) {
  SplitLevels split;
  const size_t count = LevelCount(width);
  for (size_t code = 0; code < 2 * count; ++code) {
    const int level = LevelsOf(width)[code % count], sign = code < count ? 1 : -1;
    const int coarse = sign * (level >> kFineBits), fine = sign * (level % (1 << kFineBits));
    split.at[code] = static_cast<int16_t>(coarse * 256 + (fine & 255));
  }
  return split;
}

inline constexpr SplitLevels kSplitLevels[kMaxWidth] = {
    MakeSplitLevels(1), MakeSplitLevels(2), MakeSplitLevels(3), MakeSplitLevels(4),
    MakeSplitLevels(5), MakeSplitLevels(6), MakeSplitLevels(7), MakeSplitLevels(8)};

constexpr bool CellsSuffice(int width) {
  const WideTable& table = kWideTables[width - kNarrowWidth - 1];
  const size_t borders = LevelCount(width) - 1;
  for (size_t i = 1; i < borders; ++i) {
    if (table.border[i] - table.border[i - 1] < kCell) return false;
  }
  return table.border[borders - 1] < static_cast<int>(kCells - 1) * kCell;
}
static_assert(CellsSuffice(6) && CellsSuffice(7) && CellsSuffice(8));

}  // namespace thinwire::codecs

#endif  // THINWIRE_COMPRESS_CODECS_ADAPTIVE_TABLES_H_
