// TileEncoder: from the x of a tile to wire bytes, residual and decoded values, in the order of its
// life: magnitudes, scales, codes, values.
#ifndef THINWIRE_KERNELS_TILE_ENCODER_H_
#define THINWIRE_KERNELS_TILE_ENCODER_H_

#include "compress/quantiser.h"
#include "kernels/codes.h"
#include "kernels/elements.h"
#include "kernels/jobs.h"
#include "kernels/transform.h"

namespace thinwire::kernels {

// The memory that a tile's encoding goes to.
struct EncodeTarget {
  Wire wire;          // data null: not wanted
  Elements residual;  // data null: none
  Draws draws;
  TileRange tile;

  THINWIRE_HD bool keeps_residual() const { return residual.data != nullptr; }
};

// A block's scale, and the factor that codes are made with.
struct BlockScale {
  float scale;    // NaN: the block is not finite
  float inverse;  // 0 where all codes are 0
};

// True if a block's magnitude is the mean |x|, and not the largest.
template <typename Traits>
constexpr bool UsesMean() {
  if constexpr (Traits::kElements) {
    return false;
  } else {
    return Traits::Codec::kMean;
  }
}

template <typename Team, typename Traits>
struct EncoderShared {
  typename Team::template Shared<uint32_t, kGroups> magnitudes;
  typename Team::template Shared<BlockScale, kGroups> scales;
  // A mean is summed in an order of its own.
  typename Team::template Shared<float, UsesMean<Traits>() ? kTile : 1> absolutes;
};

template <typename Team, typename Traits>
class TileEncoder {
  template <typename T>
  using PerThread = typename Team::template PerThread<T>;
  using Shared = EncoderShared<Team, Traits>;

 public:
  THINWIRE_HD TileEncoder(Team& team, Shared& shared, const Codec& codec,
                          const EncodeTarget& target)
      : team_(team), shared_(shared), codec_(codec), to_(target) {}

  // x: gradient + residual, zeros behind the last element. Leaves the decoded values there.
  THINWIRE_HD void Run(PerThread<Values>& x) {
    if constexpr (Traits::kElements) {
      team_.ForEach([&](unsigned thread) { EncodeElements(thread, x[thread]); });
    } else {
      PerThread<Values> y;  // what is quantised
      team_.ForEach([&](unsigned thread) { y[thread] = x[thread]; });
      if constexpr (Traits::kHadamard) Forward(x, y);
      Magnitudes(y);
      Codes(y);
      if constexpr (Traits::kHadamard) Backward(y);
      team_.ForEach([&](unsigned thread) {
        if (to_.keeps_residual()) KeepResidual(thread, x[thread], y[thread]);
        x[thread] = y[thread];
      });
    }
  }

 private:
  THINWIRE_HD unsigned block_size() const { return 1u << codec_.block_bits; }
  THINWIRE_HD unsigned blocks() const { return kTile >> codec_.block_bits; }
  THINWIRE_HD unsigned BlockOf(unsigned thread, unsigned quad) const {
    return PlaceOf(thread, quad) >> codec_.block_bits;
  }
  // Elements of a block of the tile; 0 behind the last one.
  THINWIRE_HD size_t CountOf(unsigned number) const {
    const size_t begin = to_.tile.begin + (size_t{number} << codec_.block_bits);
    const size_t numel = to_.tile.numel;
    return begin >= numel ? 0 : numel - begin < block_size() ? numel - begin : block_size();
  }
  THINWIRE_HD bool Transforms(unsigned block) const {
    return Traits::kHadamard && CountOf(block) == kTransform;
  }

  // (1) The magnitude of each block, and its scale.
  THINWIRE_HD void Magnitudes(PerThread<Values>& y) {
    if constexpr (Traits::Codec::kMean) {
      Means(y);
    } else {
      Maxima(y);
    }
    team_.Sync();
    // Padding behind the scales is the last tile's.
    team_.ForEach([&](unsigned thread) {
      const size_t first = to_.tile.begin >> codec_.block_bits;
      const size_t padding = to_.tile.last() ? to_.wire.codes_at / sizeof(uint16_t) : 0;
      const size_t slot = first + thread;
      if (to_.wire.data == nullptr || slot >= padding || CountOf(thread) > 0) return;
      PutScale(slot, 0.0f);
    });
  }

  THINWIRE_HD void PutScale(size_t slot, float scale) {
    reinterpret_cast<uint16_t*>(to_.wire.data)[slot] = static_cast<uint16_t>(BitsOf(scale) >> 16);
  }

  // Turns the block's magnitude, as bits, into the scale that its elements and the wire get.
  THINWIRE_HD void SettleBlock(unsigned thread, unsigned block, uint32_t magnitude) {
    if (CountOf(block) == 0) return;
    if (Transforms(block)) magnitude = TransformedMagnitude(magnitude);
    BlockScale made{0.0f, 0.0f};
    switch (KindOf(magnitude)) {
      case BlockKind::kTiny: break;
      case BlockKind::kNonFinite: made.scale = FromBf16(kNanScale); break;
      case BlockKind::kPlain:
        made.scale = PlainScale(magnitude, Transforms(block));
        made.inverse = 1.0f / made.scale;
    }
    shared_.scales.Put(team_, thread, block, made);
    const size_t first = to_.tile.begin >> codec_.block_bits;
    if (to_.wire.data != nullptr) PutScale(first + block, made.scale);
  }

  THINWIRE_HD static float PlainScale(uint32_t magnitude, bool transformed) {
    if (transformed) magnitude = BitsOf(kClip * FloatOf(magnitude));
    return Traits::Codec::PlainScale(magnitude);
  }

  // Finds the largest |x| of each block.
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
    team_.Sync();
    team_.ForEach([&](unsigned thread) {
      if (thread >= blocks()) return;
      const unsigned groups = block_size() / kGroup;
      uint32_t magnitude = 0;
      for (unsigned g = 0; g < groups; ++g) {
        const uint32_t bits = shared_.magnitudes.Get(team_, thread, thread * groups + g);
        magnitude = bits > magnitude ? bits : magnitude;
      }
      SettleBlock(thread, thread, magnitude);
    });
  }

  // Finds the mean |x| of each block. A warp sums a block: lane l elements l, l + 32, ..., in
  // order; lanes are folded 16, 8, 4, 2, 1, as FoldLanes does. Zeros behind the last element change
  // no sum.
  THINWIRE_HD void Means(PerThread<Values>& y) {
    team_.ForEach([&](unsigned thread) {
      THINWIRE_UNROLL
      for (unsigned k = 0; k < kQuads * kQuad; ++k) {
        shared_.absolutes.Put(team_, thread, PlaceOf(thread, k / kQuad) + k % kQuad,
                              FloatOf(BitsOf(y[thread].v[k]) & kAbsMask));
      }
    });
    team_.Sync();
    constexpr unsigned kWarps = kThreads / kWarp;
    for (unsigned first = 0; first < blocks(); first += kWarps) {
      PerThread<float> sum, other;
      team_.ForEach([&](unsigned thread) {
        const unsigned block = first + thread / kWarp;
        sum[thread] = 0.0f;
        if (block >= blocks()) return;
        for (unsigned i = thread % kWarp; i < block_size(); i += kSumLanes) {
          sum[thread] =
              sum[thread] + shared_.absolutes.Get(team_, thread, (block << codec_.block_bits) + i);
        }
      });
      THINWIRE_UNROLL
      for (unsigned width = kSumLanes / 2; width > 0; width /= 2) {
        team_.Exchange(sum, width, other);
        team_.ForEach([&](unsigned thread) { sum[thread] = sum[thread] + other[thread]; });
      }
      team_.ForEach([&](unsigned thread) {
        const unsigned block = first + thread / kWarp;
        if (thread % kWarp != 0 || block >= blocks() || CountOf(block) == 0) return;
        SettleBlock(thread, block, BitsOf(MeanOf(sum[thread], CountOf(block))));
      });
    }
  }

  // (2) Codes to the wire; y becomes their values.
  THINWIRE_HD void Codes(PerThread<Values>& y) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      PerThread<uint32_t> word;
      team_.ForEach([&](unsigned thread) {
        const size_t place = to_.tile.begin + PlaceOf(thread, q);
        word[thread] = 0;
        if (place >= to_.tile.numel) return;
        const BlockScale block = shared_.scales.Get(team_, thread, BlockOf(thread, q));
        float* v = y[thread].v + q * kQuad;
        int codes[kQuad];
        THINWIRE_UNROLL
        for (unsigned i = 0; i < kQuad; ++i) {
          codes[i] = CodeFor(v[i], block, place + i);
          v[i] = Mul(static_cast<float>(codes[i]), block.scale);
        }
        word[thread] = PackWord(codes);
      });
      if constexpr (Traits::kSigns) MergeBits(word);
      if (to_.wire.data == nullptr) continue;
      team_.ForEach([&](unsigned thread) { PutCodes(thread, q, word[thread]); });
    }
  }

  THINWIRE_HD int CodeFor(float x, const BlockScale& block, size_t place) const {
    using Codec = typename Traits::Codec;
    if (block.inverse == 0.0f) return Codec::kTinyCode;
    if constexpr (Codec::kStochastic) {
      if (codec_.stochastic) {
        return Codec::StochasticCodeFor(x, block.inverse, UniformOf(DrawOf(to_.draws, place)));
      }
    }
    return Codec::CodeFor(x, block.inverse);
  }

  THINWIRE_HD static uint32_t PackWord(const int* codes) {
    if constexpr (!Traits::kSigns) return PackQuad<Traits::kBits>(codes);
    uint32_t bits = 0;
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) bits |= static_cast<uint32_t>(codes[i] < 0) << i;
    return bits;
  }

  // Signs: four bits each of eight lanes are one word.
  THINWIRE_HD void MergeBits(PerThread<uint32_t>& word) {
    constexpr unsigned kLanes = 32 / kQuad;
    PerThread<uint32_t> other;
    team_.ForEach([&](unsigned thread) { word[thread] <<= thread % kLanes * kQuad; });
    THINWIRE_UNROLL
    for (unsigned mask = 1; mask < kLanes; mask *= 2) {
      team_.Exchange(word, mask, other);
      team_.ForEach([&](unsigned thread) { word[thread] |= other[thread]; });
    }
  }

  // Whole words: what lies behind the last element is padding, and 0.
  THINWIRE_HD void PutCodes(unsigned thread, unsigned quad, uint32_t word) {
    constexpr unsigned kBytes = Traits::kSigns ? 4 : Traits::kQuadBytes;
    const size_t at =
        to_.wire.codes_at + (to_.tile.begin + PlaceOf(thread, quad)) * Traits::kBits / 8;
    if (at >= to_.wire.bytes || (Traits::kSigns && thread % 8 != 0)) return;
    CopyWord<kBytes>(to_.wire.data + at, &word);
  }

  // (3) The loss. A block that is not finite leaves its residual as it was.
  THINWIRE_HD void KeepResidual(unsigned thread, const Values& x, const Values& decoded) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      const size_t place = to_.tile.begin + PlaceOf(thread, q);
      if (place >= to_.tile.numel) continue;
      if (IsNan(shared_.scales.Get(team_, thread, BlockOf(thread, q)).scale)) continue;
      float lost[kQuad];
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kQuad; ++i) lost[i] = x.v[q * kQuad + i] - decoded.v[q * kQuad + i];
      StoreQuad<DType::kF32>(lost, place, to_.tile.numel, to_.residual);
    }
  }

  // hadamard: full blocks there and back; the others stay as they are.
  THINWIRE_HD void Forward(PerThread<Values>& x, PerThread<Values>& y) {
    team_.ForEach([&](unsigned thread) { ApplySigns(codec_, thread, y[thread]); });
    TeamButterflies(team_, y);
    team_.ForEach([&](unsigned thread) {
      THINWIRE_UNROLL
      for (unsigned k = 0; k < kQuads * kQuad; ++k) {
        if (!Transforms(BlockOf(thread, k / kQuad))) y[thread].v[k] = x[thread].v[k];
      }
    });
  }

  THINWIRE_HD void Backward(PerThread<Values>& y) {
    PerThread<Values> back;
    team_.ForEach([&](unsigned thread) { back[thread] = y[thread]; });
    TeamButterflies(team_, back);
    team_.ForEach([&](unsigned thread) {
      ApplySigns(codec_, thread, back[thread]);
      THINWIRE_UNROLL
      for (unsigned k = 0; k < kQuads * kQuad; ++k) {
        const unsigned block = BlockOf(thread, k / kQuad);
        if (!Transforms(block)) continue;
        if (!IsTransformed(shared_.scales.Get(team_, thread, block).scale)) continue;
        y[thread].v[k] = back[thread].v[k];
      }
    });
  }

  // Codecs of elements: each for itself; the rules for residuals are FORMAT.md's.
  THINWIRE_HD void EncodeElements(unsigned thread, Values& x) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      const size_t place = to_.tile.begin + PlaceOf(thread, q);
      float* v = x.v + q * kQuad;
      if (place * Traits::kBits / 8 >= to_.wire.bytes && place >= to_.tile.numel) continue;
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kQuad; ++i) {
        const float decoded = Traits::Codec::ValueOf(Traits::Codec::CodeOf(v[i]));
        const float lost = v[i] - decoded;
        const bool finite = IsFinite(lost) && IsFinite(v[i]);
        if (to_.keeps_residual() && finite && place + i < to_.tile.numel) {
          static_cast<float*>(to_.residual.data)[place + i] = lost;
        }
        v[i] = decoded;
      }
      PutElements(place, v);
    }
  }

  THINWIRE_HD void PutElements(size_t place, const float* values) {
    if (to_.wire.data == nullptr || place * Traits::kBits / 8 >= to_.wire.bytes) return;
    using Code = typename Traits::Codec::Code;
    alignas(kQuad * sizeof(Code)) Code quad[kQuad];
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) quad[i] = Traits::Codec::CodeOf(values[i]);
    CopyWord<sizeof(quad)>(to_.wire.data + place * sizeof(Code), quad);
  }

  Team& team_;
  Shared& shared_;
  const Codec& codec_;
  const EncodeTarget to_;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_TILE_ENCODER_H_
