// Codes of any width and their bit planes, for a thread's part of a block at a time.
#ifndef THINWIRE_KERNELS_WIDTHS_CODES_H_
#define THINWIRE_KERNELS_WIDTHS_CODES_H_

#include "compress/codecs/adaptive_levels.h"
#include "kernels/widths.h"

namespace thinwire::kernels {

// The levels of a width as a search tree. A node is a one followed by the known bits of an index:
// the root is 1, and the border of node n of width w, between the levels below and above it, is at
// [2^(w - 1) + n]. The last step leaves 2^(w - 1) + index: the level's place after all levels of
// narrower widths, plus one.
struct LevelTree {
  float border[1 << kMaxWidth] = {};
  float level[1 << kMaxWidth] = {};
};

constexpr LevelTree MakeLevelTree() {
  LevelTree tree;
  for (unsigned i = 0; i < (1u << kMaxWidth) - 1; ++i) tree.level[i + 1] = kAdaptiveLevels[i];
  for (int width = 2; width <= kMaxWidth; ++width) {
    const unsigned count = 1u << (width - 1);
    for (unsigned node = 1; node < count; ++node) {
      unsigned above = 2 * node + 1;  // the first level above the border
      while (above < count) above *= 2;
      const uint16_t* const levels = kAdaptiveLevels + above - 1;
      tree.border[count + node] = static_cast<float>(HalfWay(levels[-1], levels[0], width));
    }
  }
  return tree;
}

inline constexpr LevelTree kLevelTree = MakeLevelTree();

// The table on the host or on the device.
THINWIRE_HD const LevelTree& Levels() {
  static constexpr LevelTree kTree = kLevelTree;
  return kTree;
}

// The codes of a thread's quads: bits 4 p to 4 p + 3 are those of plane p, the first element's
// lowest.
struct Nibbles {
  uint32_t quad[kQuads];
};

// Where a part of a block lies.
struct BlockPart {
  uint16_t head;  // 0 after the last block
  int width;
  uint32_t planes;  // in all earlier blocks of the shard
};
struct BlockParts {
  BlockPart part[kParts];
};

// y: sums of the encoder's integers, which become levels with their signs; 0 without codes.
THINWIRE_HD void FindCodes(int width, float* y, uint32_t* quads) {
  const LevelTree& tree = Levels();
  const unsigned count = width == 0 ? 0 : 1u << (width - 1);
  unsigned node[kPartElements];
  uint32_t nibbles[kTransformQuads] = {};
  THINWIRE_UNROLL
  for (unsigned k = 0; k < kPartElements; ++k) {
    node[k] = 1;
    nibbles[k / kQuad] |= static_cast<uint32_t>(y[k] < 0.0f) << k % kQuad;
  }
  for (int plane = 1; plane < width; ++plane) {
    THINWIRE_UNROLL
    for (unsigned k = 0; k < kPartElements; ++k) {
      const unsigned above = fabsf(y[k]) > tree.border[count + node[k]];
      node[k] = 2 * node[k] + above;
      nibbles[k / kQuad] |= above << (kQuad * plane + k % kQuad);
    }
  }
  THINWIRE_UNROLL
  for (unsigned k = 0; k < kPartElements; ++k) {
    const float level = width == 0 ? 0.0f : tree.level[node[k]];
    y[k] = y[k] < 0.0f ? -level : level;
  }
  THINWIRE_UNROLL
  for (unsigned q = 0; q < kTransformQuads; ++q) quads[q] = width == 0 ? 0 : nibbles[q];
}

// The levels of codes with their signs.
THINWIRE_HD void LevelsOfCodes(int width, const uint32_t* quads, float* y) {
  const LevelTree& tree = Levels();
  unsigned node[kPartElements];
  THINWIRE_UNROLL
  for (unsigned k = 0; k < kPartElements; ++k) node[k] = 1;
  for (int plane = 1; plane < width; ++plane) {
    THINWIRE_UNROLL
    for (unsigned k = 0; k < kPartElements; ++k) {
      node[k] = 2 * node[k] + (quads[k / kQuad] >> (kQuad * plane + k % kQuad) & 1);
    }
  }
  THINWIRE_UNROLL
  for (unsigned k = 0; k < kPartElements; ++k) {
    const float level = width == 0 ? 0.0f : tree.level[node[k]];
    y[k] = quads[k / kQuad] >> k % kQuad & 1 ? -level : level;
  }
}

// Converts eight lanes' nibbles of all planes to one plane's nibbles of eight lanes, which are a
// word of the plane, or back: lane l has plane l mod 8. A transposition of 8 by 8 nibbles in three
// exchanges.
template <typename Team>
THINWIRE_HD void TransposeNibbles(Team& team, typename Team::template PerThread<uint32_t>& word) {
  constexpr uint32_t kClear[] = {0, 0x0f0f0f0fu, 0x00ff00ffu, 0, 0x0000ffffu};
  typename Team::template PerThread<uint32_t> other;
  THINWIRE_UNROLL
  for (unsigned mask = 1; mask < kMaxWidth; mask *= 2) {
    team.Exchange(word, mask, other);
    team.ForEach([&](unsigned thread) {
      const uint32_t low = kClear[mask], own = word[thread], theirs = other[thread];
      word[thread] = thread & mask ? (own & ~low) | (theirs & ~low) >> (kQuad * mask)
                                   : (own & low) | (theirs & low) << (kQuad * mask);
    });
  }
}

// After TransposeNibbles a lane has a word of this plane, if the block has the plane.
THINWIRE_HD unsigned PlaneOf(unsigned thread) { return thread % kMaxWidth; }
THINWIRE_HD bool HasPlane(const BlockPart& part, unsigned thread) {
  return static_cast<int>(PlaneOf(thread)) < part.width;
}
// Bytes of codes before that word.
THINWIRE_HD size_t PlaneWordAt(const BlockPart& part, unsigned thread, unsigned quad) {
  const unsigned in_quad = thread % kWarp / kMaxWidth;
  const unsigned word = quad % kTransformQuads * (kWarp / kMaxWidth) + in_quad;
  return (size_t{part.planes} + PlaneOf(thread)) * kPlaneBytes + word * sizeof(uint32_t);
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_WIDTHS_CODES_H_
