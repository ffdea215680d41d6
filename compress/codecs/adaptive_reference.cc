#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "compress/codec_info.h"
#include "compress/codecs/adaptive.h"
#include "compress/codecs/adaptive_levels.h"
#include "compress/types.h"

namespace thinwire::codecs {
namespace {

using Values = std::array<float, kTransform>;
using Wholes = std::array<int, kTransform>;

// Widths.

int WidthAt(const Shard& shard, const uint8_t* wire, size_t block, int threshold) {
  return AdaptiveWidth(Get<uint16_t>(wire, block), threshold, static_cast<int>(shard.spec.floor));
}

int WidthOf(const Shard& shard, const Walk& walk, const uint8_t* wire, size_t block) {
  return WidthAt(shard, wire, block, walk.threshold - (block < walk.raised ? 1 : 0));
}

size_t PlanesAt(const Shard& shard, const uint8_t* wire, int threshold) {
  size_t planes = 0;
  for (size_t b = 0; b < shard.layout.blocks; ++b) planes += WidthAt(shard, wire, b, threshold);
  return planes;
}

void Begin(const Shard& shard, const uint8_t* wire, Walk* walk) {
  const size_t budget = AdaptivePlanes(shard.spec.sixteenths, shard.layout.blocks);
  // The floor fits, so the highest threshold does, for any heads.
  int low = kLowestThreshold, high = kHighestThreshold;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (PlanesAt(shard, wire, middle) <= budget) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  size_t left = budget - PlanesAt(shard, wire, low);
  *walk = {low, 0, 0};
  for (; walk->raised < shard.layout.blocks; ++walk->raised) {
    const size_t more =
        WidthAt(shard, wire, walk->raised, low - 1) - WidthAt(shard, wire, walk->raised, low);
    if (more > left) break;
    left -= more;
  }
}

// Blocks.

float InputAt(const float* g, const float* r, size_t i) {
  return r == nullptr ? Get<float>(g, i) : Get<float>(g, i) + Get<float>(r, i);
}

// A block of a piece, padded with zeros.
Values BlockAt(const Piece& piece, size_t begin, const float* g, const float* r) {
  Values x{};
  const size_t count = std::min(kTransform, piece.numel - begin);
  for (size_t i = 0; i < count; ++i) x[i] = InputAt(g, r, begin + i);
  return x;
}

// Calls visit(number of the block in the shard, its first element in the piece).
template <typename Visit>
void ForEachBlock(const Piece& piece, Visit visit) {
  for (size_t at = 0; at < piece.numel; at += kTransform) {
    visit((piece.begin + at) / kTransform, at);
  }
}

float SumOfSquares(const Values& x, float factor) {
  std::array<float, kSumLanes> lanes{};
  for (size_t i = 0; i < kTransform; ++i) {
    const float scaled = x[i] * factor;
    lanes[i % kSumLanes] = lanes[i % kSumLanes] + scaled * scaled;
  }
  return FoldLanes(lanes.data());
}

uint16_t HeadOf(const Values& x) {
  const float sum = SumOfSquares(x, 1.0f);
  if (SquaresAreInRange(sum)) return AdaptiveHead(sum, 1.0f);
  const float factor = SquaresFactor(sum);
  return AdaptiveHead(SumOfSquares(x, factor), Undo(factor));
}

std::span<const uint16_t> LevelsOf(int width) {
  const size_t count = size_t{1} << (width - 1);
  return {kAdaptiveLevels + count - 1, count};
}

// The number of borders between levels that a magnitude has passed.
size_t IndexOf(int magnitude, int width) {
  const std::span<const uint16_t> levels = LevelsOf(width);
  size_t index = 0;
  while (index + 1 < levels.size() &&
         magnitude > HalfWay(levels[index], levels[index + 1], width)) {
    ++index;
  }
  return index;
}

// Bit i of plane 0 is the sign of element i; the following planes are its index, highest bit first.
void PutCodes(const Wholes& whole, int width, uint8_t* planes) {
  std::memset(planes, 0, width * kPlaneBytes);
  for (size_t i = 0; i < kTransform; ++i) {
    const size_t index = IndexOf(std::abs(whole[i]), width);
    const size_t code = (whole[i] < 0 ? size_t{1} << (width - 1) : 0) | index;
    for (int plane = 0; plane < width; ++plane) {
      const unsigned bit = code >> (width - 1 - plane) & 1;
      planes[plane * kPlaneBytes + i / 8] |= static_cast<uint8_t>(bit << (i % 8));
    }
  }
}

Wholes GetLevels(const uint8_t* planes, int width) {
  const std::span<const uint16_t> levels = LevelsOf(width);
  Wholes whole;
  for (size_t i = 0; i < kTransform; ++i) {
    size_t code = 0;
    for (int plane = 0; plane < width; ++plane) {
      code = code << 1 | (planes[plane * kPlaneBytes + i / 8] >> (i % 8) & 1);
    }
    const int level = levels[code % levels.size()];
    whole[i] = code >= levels.size() ? -level : level;
  }
  return whole;
}

Values Decoded(const Shard& shard, float head, int width, const uint8_t* planes) {
  Values values;
  if (width == 0) {
    values.fill(0.0f);
    return values;
  }
  Wholes whole = GetLevels(planes, width);
  Butterflies(whole.data());
  const float step = AdaptiveStep(head, width);
  for (size_t i = 0; i < kTransform; ++i) {
    values[i] = static_cast<float>(whole[i]) * (shard.signs[i] * step);
  }
  return values;
}

// Pieces.

void EncodeHeads(const Piece& piece, const float* g, float* r, uint8_t* wire) {
  ForEachBlock(piece, [&](size_t block, size_t at) {
    const Values x = BlockAt(piece, at, g, r);
    const uint16_t head = HeadOf(x);
    Put(wire, block, head);
    if (r == nullptr || head == kNanScale) return;
    const size_t count = std::min(kTransform, piece.numel - at);
    for (size_t i = 0; i < count; ++i) Put(r, at + i, x[i]);
  });
}

void Encode(const Piece& piece, const float* g, float* r, uint8_t* wire) {
  const Shard& shard = piece.shard;
  ForEachBlock(piece, [&](size_t block, size_t at) {
    const uint16_t half = Get<uint16_t>(wire, block);
    if (half >= kFirstNonFiniteHead) return;  // its residual is unchanged
    const int width = WidthOf(shard, *piece.walk, wire, block);
    const float head = FromBf16(half), inverse = AdaptiveInverse(head);
    const Values x = BlockAt(piece, at, r == nullptr ? g : r, nullptr);
    uint8_t* const planes = wire + shard.layout.codes_at + piece.walk->next_at;
    if (width > 0) {
      Wholes whole;
      for (size_t i = 0; i < kTransform; ++i) {
        whole[i] = static_cast<int>(rintf(x[i] * (shard.signs[i] * inverse)));
      }
      Butterflies(whole.data());
      PutCodes(whole, width, planes);
      piece.walk->next_at += width * kPlaneBytes;
    }
    if (r == nullptr) return;
    const Values decoded = Decoded(shard, head, width, planes);
    const size_t count = std::min(kTransform, piece.numel - at);
    for (size_t i = 0; i < count; ++i) Put(r, at + i, x[i] - decoded[i]);
  });
}

// Calls visit(element of the piece, value).
template <typename Visit>
void ForEachValue(const Piece& piece, const uint8_t* wire, Visit visit) {
  const Shard& shard = piece.shard;
  ForEachBlock(piece, [&](size_t block, size_t at) {
    const uint16_t half = Get<uint16_t>(wire, block);
    const size_t count = std::min(kTransform, piece.numel - at);
    if (half >= kFirstNonFiniteHead) {
      for (size_t i = 0; i < count; ++i) visit(at + i, FromBf16(kNanScale));
      return;
    }
    const int width = WidthOf(shard, *piece.walk, wire, block);
    const uint8_t* const planes = wire + shard.layout.codes_at + piece.walk->next_at;
    const Values values = Decoded(shard, FromBf16(half), width, planes);
    for (size_t i = 0; i < count; ++i) visit(at + i, values[i]);
    piece.walk->next_at += width * kPlaneBytes;
  });
}

void Decode(const Piece& piece, const uint8_t* wire, float* out) {
  ForEachValue(piece, wire, [&](size_t i, float value) { Put(out, i, value); });
}

void DecodeAdd(const Piece& piece, const uint8_t* wire, float* sum) {
  ForEachValue(piece, wire,
               [&](size_t i, float value) { Put(sum, i, Get<float>(sum, i) + value); });
}

}  // namespace

constinit const CodecOperations Adaptive::kReference = {.encode = Encode,
                                                        .decode = Decode,
                                                        .decode_add = DecodeAdd,
                                                        .heads = EncodeHeads,
                                                        .begin = Begin};

}  // namespace thinwire::codecs
