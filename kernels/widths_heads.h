// The heads of a tile's blocks: root mean squares, summed in FORMAT.md's order.
#ifndef THINWIRE_KERNELS_WIDTHS_HEADS_H_
#define THINWIRE_KERNELS_WIDTHS_HEADS_H_

#include "kernels/elements.h"
#include "kernels/widths.h"

namespace thinwire::kernels {

// Heads of the blocks of which a thread holds a part.
struct Heads {
  uint16_t of[kParts];
};

template <typename Team>
struct HeadsShared {
  typename Team::template Shared<float, kTile> elements;
};

template <typename Team>
class TileHeads {
  template <typename T>
  using PerThread = typename Team::template PerThread<T>;

 public:
  THINWIRE_HD TileHeads(Team& team, HeadsShared<Team>& shared) : team_(team), shared_(shared) {}

  // x: zeros after the last element.
  THINWIRE_HD void Run(PerThread<Values>& x, PerThread<Heads>& heads) {
    team_.ForEach([&](unsigned thread) {
      THINWIRE_UNROLL
      for (unsigned k = 0; k < kQuads * kQuad; ++k) {
        shared_.elements.Put(team_, thread, PlaceOf(thread, k / kQuad) + k % kQuad, x[thread].v[k]);
      }
    });
    team_.Sync();
    THINWIRE_UNROLL
    for (unsigned part = 0; part < kParts; ++part) HeadsOf(part, heads);
  }

 private:
  // A warp sums a block, as in TileScales::Means; again, scaled, if squares overflow or vanish.
  THINWIRE_HD void HeadsOf(unsigned part, PerThread<Heads>& heads) {
    PerThread<float> factor, sum, again;
    team_.ForEach([&](unsigned thread) { sum[thread] = LaneSum(thread, part, 1.0f); });
    Fold(sum);
    team_.ForEach([&](unsigned thread) {
      again[thread] = 0.0f;
      if (SquaresAreInRange(sum[thread])) return;
      factor[thread] = SquaresFactor(sum[thread]);
      again[thread] = LaneSum(thread, part, factor[thread]);
    });
    Fold(again);
    team_.ForEach([&](unsigned thread) {
      heads[thread].of[part] = SquaresAreInRange(sum[thread])
                                   ? AdaptiveHead(sum[thread], 1.0f)
                                   : AdaptiveHead(again[thread], Undo(factor[thread]));
    });
  }

  // Lane l adds elements l, l + 32, ... of the block.
  THINWIRE_HD float LaneSum(unsigned thread, unsigned part, float factor) {
    float sum = 0.0f;
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kTransform; i += kSumLanes) {
      const float x = shared_.elements.Get(
          team_, thread, BlockOfPart(thread, part) * kTransform + i + thread % kWarp);
      const float scaled = x * factor;
      sum = sum + scaled * scaled;
    }
    return sum;
  }

  // Like FoldLanes; all lanes get the sum.
  THINWIRE_HD void Fold(PerThread<float>& sum) {
    PerThread<float> other;
    THINWIRE_UNROLL
    for (unsigned width = kSumLanes / 2; width > 0; width /= 2) {
      team_.Exchange(sum, width, other);
      team_.ForEach([&](unsigned thread) { sum[thread] = sum[thread] + other[thread]; });
    }
  }

  Team& team_;
  HeadsShared<Team>& shared_;
};

// Writes a tile's heads, and the padding after the shard's last one.
template <typename Team>
THINWIRE_HD void PutHeads(Team& team, typename Team::template PerThread<Heads>& heads,
                          const Wire& wire, const TileRange& tile) {
  team.ForEach([&](unsigned thread) {
    auto* const slots = reinterpret_cast<uint16_t*>(wire.data);
    const uint32_t first = FirstBlockOf(tile), blocks = BlocksOf(tile.numel);
    THINWIRE_UNROLL
    for (unsigned part = 0; part < kParts; ++part) {
      const uint32_t block = first + BlockOfPart(thread, part);
      if (thread % kWarp == 0 && block < blocks) slots[block] = heads[thread].of[part];
    }
    const size_t padding = size_t{blocks} + thread;
    if (tile.last() && padding < wire.codes_at / sizeof(uint16_t)) slots[padding] = 0;
  });
}

// Stores x until the codes are made; a block that is not finite leaves the residual unchanged.
template <typename Team>
THINWIRE_HD void KeepFinite(Team& team, typename Team::template PerThread<Values>& x,
                            typename Team::template PerThread<Heads>& heads, const TileRange& tile,
                            const Elements& residual) {
  team.ForEach([&](unsigned thread) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      if (heads[thread].of[q / kTransformQuads] == kNanScale) continue;
      StoreQuad<DType::kF32>(x[thread].v + q * kQuad, tile.Place(thread, q), tile.numel, residual);
    }
  });
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_WIDTHS_HEADS_H_
