// TileScales: computes the magnitude of each block of a tile, and its scale. The warp in which a
// block begins computes both. Blocks of up to 512 elements lie in one warp, and then no warp waits
// for another.
#ifndef THINWIRE_KERNELS_TILE_SCALES_H_
#define THINWIRE_KERNELS_TILE_SCALES_H_

#include "compress/element_math.h"
#include "kernels/elements.h"
#include "kernels/jobs.h"
#include "kernels/tile.h"

namespace thinwire::kernels {

// The memory to which a tile is encoded.
struct EncodeTarget {
  Wire wire;          // data null: not needed
  Elements residual;  // data null: none
  bool decodes;       // the decoded values are needed, even without a residual
  TileRange tile;

  THINWIRE_HD bool keeps_residual() const { return residual.data != nullptr; }
};

// A block's scale, and the factor for its codes.
struct BlockScale {
  float scale;    // NaN: the block is not finite
  float inverse;  // 0 if all codes are 0
};

// True if a block's magnitude is the mean |x| and not the largest.
template <typename Traits>
constexpr bool UsesMean() {
  if constexpr (Traits::kElements) {
    return false;
  } else {
    return Traits::Codec::kMean;
  }
}

// The blocks of a tile. Members here and below are values: references would put them in a GPU's
// slow local memory.
template <typename Traits>
class TileBlocks {
 public:
  THINWIRE_HD TileBlocks(const Codec& codec, const TileRange& tile)
      : bits_(codec.block_bits), tile_(tile) {}

  THINWIRE_HD unsigned size() const { return 1u << bits_; }
  THINWIRE_HD unsigned Of(unsigned thread, unsigned quad) const {
    return PlaceOf(thread, quad) >> bits_;
  }
  // True if no block spans two warps.
  THINWIRE_HD bool LieInWarps() const { return size() <= kWarpElements; }
  // The blocks that begin in a warp are FirstOf(warp), FirstOf(warp) + 1 and so on.
  THINWIRE_HD unsigned FirstOf(unsigned warp) const { return (warp * kWarpElements) >> bits_; }
  THINWIRE_HD unsigned CountIn(unsigned warp) const {
    if (LieInWarps()) return kWarpElements >> bits_;
    return (warp * kWarpElements) % size() == 0;
  }
  // Elements of a block; 0 after the last one.
  THINWIRE_HD size_t CountOf(unsigned number) const {
    const size_t begin = tile_.begin + (size_t{number} << bits_);
    return begin >= tile_.numel ? 0 : tile_.numel - begin < size() ? tile_.numel - begin : size();
  }
  THINWIRE_HD bool Transforms(unsigned number) const {
    return Traits::kHadamard && CountOf(number) == kTransform;
  }

 private:
  const uint32_t bits_;
  const TileRange tile_;
};

template <typename Team, typename Traits>
struct EncoderShared {
  typename Team::template Shared<uint32_t, kGroups> magnitudes;
  typename Team::template Shared<BlockScale, kGroups> scales;
  // Means are summed in a special order.
  typename Team::template Shared<float, UsesMean<Traits>() ? kTile : 1> absolutes;
};

template <typename Team, typename Traits>
class TileScales {
  template <typename T>
  using PerThread = typename Team::template PerThread<T>;
  using Shared = EncoderShared<Team, Traits>;

 public:
  THINWIRE_HD TileScales(Team& team, Shared& shared, const Codec& codec, const EncodeTarget& target)
      : team_(team), shared_(shared), codec_(codec), to_(target), blocks_(codec, target.tile) {}

  // Writes scales to the wire, and to `shared`, from which all threads may then read them.
  THINWIRE_HD void Run(PerThread<Values>& y) {
    if constexpr (Traits::Codec::kMean) {
      Means(y);
    } else {
      Maxima(y);
    }
    SyncBlocks();
    Pad();
  }

 private:
  // Afterwards threads of a block may read what one of them has written.
  THINWIRE_HD void SyncBlocks() {
    if (blocks_.LieInWarps()) {
      team_.SyncWarp();
    } else {
      team_.Sync();
    }
  }

  // The last tile writes the padding after the scales.
  THINWIRE_HD void Pad() {
    if (!to_.tile.last() || to_.wire.data == nullptr) return;
    team_.ForEach([&](unsigned thread) {
      const size_t slot = (to_.tile.begin >> codec_.block_bits) + thread;
      if (slot >= to_.wire.codes_at / sizeof(uint16_t) || blocks_.CountOf(thread) > 0) return;
      PutScale(slot, 0.0f);
    });
  }

  THINWIRE_HD void PutScale(size_t slot, float scale) {
    reinterpret_cast<uint16_t*>(to_.wire.data)[slot] = static_cast<uint16_t>(BitsOf(scale) >> 16);
  }

  // Converts the block's magnitude, as bits, to its scale, for its elements and for the wire. A
  // block after the last element is tiny, and not in the wire.
  THINWIRE_HD void SettleBlock(unsigned thread, unsigned block, uint32_t magnitude) {
    if (blocks_.Transforms(block)) magnitude = TransformedMagnitude(magnitude);
    BlockScale made{0.0f, 0.0f};
    switch (KindOf(magnitude)) {
      case BlockKind::kTiny: break;
      case BlockKind::kNonFinite: made.scale = FromBf16(kNanScale); break;
      case BlockKind::kPlain:
        made.scale = PlainScale(magnitude, blocks_.Transforms(block));
        made.inverse = Traits::Codec::kMean ? 1.0f : 1.0f / made.scale;  // signs need none
    }
    shared_.scales.Put(team_, thread, block, made);
    const size_t first = to_.tile.begin >> codec_.block_bits;
    if (to_.wire.data == nullptr || blocks_.CountOf(block) == 0) return;
    PutScale(first + block, made.scale);
  }

  THINWIRE_HD static float PlainScale(uint32_t magnitude, bool transformed) {
    if (transformed) magnitude = BitsOf(kClip * FloatOf(magnitude));
    return Traits::Codec::PlainScale(magnitude);
  }

  // Computes the largest |x| of each block.
  THINWIRE_HD void Maxima(PerThread<Values>& y) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      PerThread<uint32_t> largest;
      team_.ForEach([&](unsigned thread) {
        uint32_t magnitude = 0;
        THINWIRE_UNROLL
        for (unsigned i = 0; i < kQuad; ++i) {
          const uint32_t bits = BitsOf(y[thread].v[q * kQuad + i]) & kAbsMask;
          magnitude = bits > magnitude ? bits : magnitude;
        }
        largest[thread] = magnitude;
      });
      team_.WarpMax(largest);
      team_.ForEach([&](unsigned thread) {
        if (thread % kWarp != 0) return;
        shared_.magnitudes.Put(team_, thread, PlaceOf(thread, q) / kGroup, largest[thread]);
      });
    }
    SyncBlocks();
    team_.ForEach([&](unsigned thread) {
      const unsigned warp = thread / kWarp, lane = thread % kWarp;
      if (lane >= blocks_.CountIn(warp)) return;
      const unsigned block = blocks_.FirstOf(warp) + lane, groups = blocks_.size() / kGroup;
      uint32_t magnitude = 0;
      for (unsigned g = 0; g < groups; ++g) {
        const uint32_t bits = shared_.magnitudes.Get(team_, thread, block * groups + g);
        magnitude = bits > magnitude ? bits : magnitude;
      }
      SettleBlock(thread, block, magnitude);
    });
  }

  // Computes the mean |x| of each block. A warp sums a block: lane l adds elements l, l + 32, ...,
  // in order; lanes are folded 16, 8, 4, 2, 1, as in FoldLanes. Zeros after the last element change
  // no sum.
  THINWIRE_HD void Means(PerThread<Values>& y) {
    team_.ForEach([&](unsigned thread) {
      THINWIRE_UNROLL
      for (unsigned k = 0; k < kQuads * kQuad; ++k) {
        shared_.absolutes.Put(team_, thread, PlaceOf(thread, k / kQuad) + k % kQuad,
                              FloatOf(BitsOf(y[thread].v[k]) & kAbsMask));
      }
    });
    SyncBlocks();
    for (unsigned number = 0; number < blocks_.CountIn(0); ++number) {
      PerThread<float> sum, other;
      team_.ForEach([&](unsigned thread) {
        const unsigned warp = thread / kWarp;
        sum[thread] =
            number < blocks_.CountIn(warp) ? LaneSum(thread, blocks_.FirstOf(warp) + number) : 0.0f;
      });
      THINWIRE_UNROLL
      for (unsigned width = kSumLanes / 2; width > 0; width /= 2) {
        team_.Exchange(sum, width, other);
        team_.ForEach([&](unsigned thread) { sum[thread] = sum[thread] + other[thread]; });
      }
      team_.ForEach([&](unsigned thread) {
        const unsigned warp = thread / kWarp, block = blocks_.FirstOf(warp) + number;
        if (thread % kWarp != 0 || number >= blocks_.CountIn(warp)) return;
        const size_t count = blocks_.CountOf(block);
        SettleBlock(thread, block, count == 0 ? 0 : BitsOf(MeanOf(sum[thread], count)));
      });
    }
  }

  // Lane l's part of a block's sum: elements l, l + 32, ..., in order.
  THINWIRE_HD float LaneSum(unsigned thread, unsigned block) {
    float sum = 0.0f;
    for (unsigned group = 0; group < blocks_.size(); group += kGroup) {
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kGroup; i += kSumLanes) {
        const unsigned place = (block << codec_.block_bits) + group + i + thread % kWarp;
        sum = sum + shared_.absolutes.Get(team_, thread, place);
      }
    }
    return sum;
  }

  Team& team_;
  Shared& shared_;
  const Codec& codec_;
  const EncodeTarget to_;
  const TileBlocks<Traits> blocks_;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_TILE_SCALES_H_
