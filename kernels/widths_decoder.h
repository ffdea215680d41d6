// WidthsDecoder: decodes the wire bytes of a tile, with its shard's plan, to the values that a team
// holds.
#ifndef THINWIRE_KERNELS_WIDTHS_DECODER_H_
#define THINWIRE_KERNELS_WIDTHS_DECODER_H_

#include "kernels/widths_codes.h"
#include "kernels/word.h"

namespace thinwire::kernels {

// Finds heads, widths and places of the blocks of which a thread holds a part.
template <typename Team>
THINWIRE_HD void FindParts(Team& team, const Codec& codec, const uint8_t* wire,
                           const TileRange& tile, const WidthsPlan& plan,
                           typename Team::template PerThread<BlockParts>& parts) {
  const auto* const heads = reinterpret_cast<const uint16_t*>(wire);
  const auto width_of = [&](uint32_t block) {
    const int threshold = plan.threshold - (block < plan.raised ? 1 : 0);
    return AdaptiveWidth(heads[block], threshold, static_cast<int>(codec.floor));
  };
  const uint32_t blocks = BlocksOf(tile.numel), each = BlocksPerMark(blocks);
  const uint32_t mark = FirstBlockOf(tile) / each;
  typename Team::template PerThread<uint32_t> planes, other;
  // From the last mark to the warp's first block.
  team.ForEach([&](unsigned thread) {
    const uint32_t own = FirstBlockOf(tile) + BlockOfPart(thread, 0);
    const uint32_t end = own < blocks ? own : blocks;
    planes[thread] = 0;
    for (uint32_t block = mark * each + thread % kWarp; block < end; block += kWarp) {
      planes[thread] += static_cast<uint32_t>(width_of(block));
    }
  });
  THINWIRE_UNROLL
  for (unsigned mask = 1; mask < kWarp; mask *= 2) {
    team.Exchange(planes, mask, other);
    team.ForEach([&](unsigned thread) { planes[thread] += other[thread]; });
  }
  team.ForEach([&](unsigned thread) {
    uint32_t before = plan.before[mark] + planes[thread];
    THINWIRE_UNROLL
    for (unsigned p = 0; p < kParts; ++p) {
      const uint32_t block = FirstBlockOf(tile) + BlockOfPart(thread, p);
      BlockPart& part = parts[thread].part[p];
      part.head = block < blocks ? heads[block] : 0;
      part.width = block < blocks ? width_of(block) : 0;
      part.planes = before;
      before += static_cast<uint32_t>(part.width);
    }
  });
}

// Converts levels to values.
template <typename Team>
THINWIRE_HD void ValuesOfLevels(Team& team, const Codec& codec,
                                typename Team::template PerThread<BlockParts>& parts,
                                typename Team::template PerThread<Values>& y) {
  TeamButterflies(team, y);  // of integers: any order gives the same sums
  team.ForEach([&](unsigned thread) {
    THINWIRE_UNROLL
    for (unsigned p = 0; p < kParts; ++p) {
      const BlockPart& part = parts[thread].part[p];
      const bool finite = part.head < kFirstNonFiniteHead;
      const float step = AdaptiveStep(FromBf16(part.head), part.width);
      THINWIRE_UNROLL
      for (unsigned k = 0; k < kPartElements; ++k) {
        float& v = y[thread].v[p * kPartElements + k];
        const unsigned place = PlaceOf(thread, p * kTransformQuads + k / kQuad) + k % kQuad;
        v = v * (SignOf(codec, place) * step);
        if (part.width == 0) v = finite ? 0.0f : FromBf16(kNanScale);
      }
    }
  });
}

template <typename Team>
class WidthsDecoder {
  template <typename T>
  using PerThread = typename Team::template PerThread<T>;

 public:
  THINWIRE_HD WidthsDecoder(Team& team, const Codec& codec, const uint8_t* wire, size_t codes_at,
                            const TileRange& tile, const WidthsPlan& plan)
      : team_(team), codec_(codec), wire_(wire), codes_at_(codes_at), tile_(tile), plan_(plan) {}

  // Zeros after the last element.
  THINWIRE_HD void Run(PerThread<Values>& out) {
    PerThread<BlockParts> parts;
    FindParts(team_, codec_, wire_, tile_, plan_, parts);
    PerThread<Nibbles> nibbles;
    LoadPlanes(parts, nibbles);
    team_.ForEach([&](unsigned thread) {
      THINWIRE_UNROLL
      for (unsigned p = 0; p < kParts; ++p) {
        LevelsOfCodes(parts[thread].part[p].width, nibbles[thread].quad + p * kTransformQuads,
                      out[thread].v + p * kPartElements);
      }
    });
    ValuesOfLevels(team_, codec_, parts, out);
    team_.ForEach([&](unsigned thread) {
      THINWIRE_UNROLL
      for (unsigned k = 0; k < kQuads * kQuad; ++k) {
        const size_t place = tile_.begin + PlaceOf(thread, k / kQuad) + k % kQuad;
        if (place >= tile_.numel) out[thread].v[k] = 0.0f;
      }
    });
  }

 private:
  THINWIRE_HD void LoadPlanes(PerThread<BlockParts>& parts, PerThread<Nibbles>& nibbles) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      PerThread<uint32_t> word;
      team_.ForEach([&](unsigned thread) {
        word[thread] = 0;
        const BlockPart& part = parts[thread].part[q / kTransformQuads];
        if (!HasPlane(part, thread)) return;
        const size_t at = codes_at_ + PlaneWordAt(part, thread, q);
        CopyWord<sizeof(uint32_t)>(&word[thread], wire_ + at);
      });
      TransposeNibbles(team_, word);
      team_.ForEach([&](unsigned thread) { nibbles[thread].quad[q] = word[thread]; });
    }
  }

  Team& team_;
  const Codec& codec_;
  const uint8_t* const wire_;
  const size_t codes_at_;
  const TileRange tile_;
  const WidthsPlan& plan_;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_WIDTHS_DECODER_H_
