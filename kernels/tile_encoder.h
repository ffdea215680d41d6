// TileEncoder: encodes the x of a tile to wire bytes, residual and decoded values, in this order:
// scales, codes, values, loss.
#ifndef THINWIRE_KERNELS_TILE_ENCODER_H_
#define THINWIRE_KERNELS_TILE_ENCODER_H_

#include "kernels/codes.h"
#include "kernels/tile_scales.h"
#include "kernels/transform.h"

namespace thinwire::kernels {

template <typename Team, typename Traits>
class TileEncoder {
  template <typename T>
  using PerThread = typename Team::template PerThread<T>;
  using Shared = EncoderShared<Team, Traits>;

 public:
  THINWIRE_HD TileEncoder(Team& team, Shared& shared, const Codec& codec,
                          const EncodeTarget& target)
      : team_(team), shared_(shared), codec_(codec), to_(target), blocks_(codec, to_.tile) {}

  // x: gradient + residual, zeros after the last element. Replaces x by the decoded values, if they
  // are needed.
  THINWIRE_HD void Run(PerThread<Values>& x) {
    if constexpr (Traits::kElements) {
      team_.ForEach([&](unsigned thread) { EncodeElements(thread, x[thread]); });
    } else {
      PerThread<Values> y;  // the values that are quantised
      team_.ForEach([&](unsigned thread) { y[thread] = x[thread]; });
      if constexpr (Traits::kHadamard) Forward(x, y);
      TileScales<Team, Traits>(team_, shared_, codec_, to_).Run(y);
      Codes(y);
      if (!to_.decodes && !to_.keeps_residual()) return;
      team_.ForEach([&](unsigned thread) {
        THINWIRE_UNROLL
        for (unsigned q = 0; q < kQuads; ++q) {
          ScaleQuad(scales_[thread].of[q].scale, y[thread].v + q * kQuad);
        }
      });
      if constexpr (Traits::kHadamard) Backward(y);
      team_.ForEach([&](unsigned thread) {
        if (to_.keeps_residual()) KeepResidual(thread, x[thread], y[thread]);
        x[thread] = y[thread];
      });
    }
  }

 private:
  // A thread's quads: their blocks' scales, and their codes.
  struct QuadScales {
    BlockScale of[kQuads];
  };
  struct QuadWords {
    uint32_t of[kQuads];
  };

  // Writes codes to the wire; y becomes the codes, as floats.
  THINWIRE_HD void Codes(PerThread<Values>& y) {
    PerThread<QuadWords> words;
    team_.ForEach([&](unsigned thread) {
      THINWIRE_UNROLL
      for (unsigned q = 0; q < kQuads; ++q) {
        scales_[thread].of[q] = shared_.scales.Get(team_, thread, blocks_.Of(thread, q));
      }
      MakeCodes(scales_[thread], y[thread], words[thread]);
    });
    if constexpr (Traits::kSigns) MergeSigns(words);
    if (to_.wire.data == nullptr) return;
    team_.ForEach([&](unsigned thread) { PutCodes(thread, words[thread]); });
  }

  // Packs the codes of each quad into one integer; y becomes the codes. A block without a factor,
  // which may have NaNs, is treated as tiny by a select: a branch would take longer.
  THINWIRE_HD static void MakeCodes(const QuadScales& scales, Values& y, QuadWords& words) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      const float inverse = scales.of[q].inverse;
      float* const v = y.v + q * kQuad;
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kQuad; ++i) {
        v[i] = inverse != 0.0f ? v[i] : static_cast<float>(Traits::Codec::kTinyCode);
      }
      if constexpr (Traits::kSigns) {
        words.of[q] = MakeSigns(v);
      } else {
        words.of[q] = MakeQuad(inverse, v);
      }
    }
  }

  THINWIRE_HD static uint32_t MakeQuad(float inverse, float* v) {
    uint32_t codes[kQuad];
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) {
      const float rounded = Saturated(v[i] * inverse) + kRounder;
      codes[i] = BitsOf(rounded);
      v[i] = rounded - kRounder;
    }
    return PackQuad<Traits::kBits>(codes);
  }

  // v becomes 1 or -1; returns the sign bits.
  THINWIRE_HD static uint32_t MakeSigns(float* v) {
    uint32_t signs = 0;
    THINWIRE_UNROLL
    for (unsigned i = kQuad; i-- > 0;) {
      signs = signs << 1 | BitsOf(v[i]) >> 31;
      v[i] = FloatOf(BitsOf(1.0f) | (BitsOf(v[i]) & ~kAbsMask));
    }
    return signs;
  }

  // A block's scale comes from its largest element, so no code exceeds qmax; but the scale of a
  // transformed block is clipped.
  THINWIRE_HD static float Saturated(float scaled) {
    if constexpr (!Traits::kHadamard) return scaled;
    constexpr float kMost = Traits::Codec::kTraits.qmax;
    return scaled > kMost ? kMost : scaled < -kMost ? -kMost : scaled;
  }

  // Signs: four bits from each of eight lanes make one word.
  THINWIRE_HD void MergeSigns(PerThread<QuadWords>& words) {
    constexpr unsigned kLanes = 32 / kQuad;
    PerThread<uint32_t> word, other;
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      team_.ForEach([&](unsigned thread) {
        word[thread] = words[thread].of[q] << (thread % kLanes * kQuad);
      });
      THINWIRE_UNROLL
      for (unsigned mask = 1; mask < kLanes; mask *= 2) {
        team_.Exchange(word, mask, other);
        team_.ForEach([&](unsigned thread) { word[thread] |= other[thread]; });
      }
      team_.ForEach([&](unsigned thread) { words[thread].of[q] = word[thread]; });
    }
  }

  // Stores whole words: bits after the last element are padding, and 0.
  THINWIRE_HD void PutCodes(unsigned thread, const QuadWords& words) {
    constexpr unsigned kBytes = Traits::kSigns ? 4 : Traits::kQuadBytes;
    if (Traits::kSigns && thread % 8 != 0) return;
    const size_t first = to_.wire.codes_at + CodeBytes<Traits>(to_.tile.Place(thread, 0));
    const bool full = to_.tile.full();
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      const size_t at = first + CodeBytes<Traits>(q * kGroup);
      if (full || at < to_.wire.bytes) CopyWord<kBytes>(to_.wire.data + at, &words.of[q]);
    }
  }

  // Stores the loss. A block that is not finite leaves its residual unchanged.
  THINWIRE_HD void KeepResidual(unsigned thread, const Values& x, const Values& decoded) {
    const bool whole = to_.tile.full() && to_.residual.quads;
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      if (IsNan(scales_[thread].of[q].scale)) continue;
      const size_t place = to_.tile.Place(thread, q);
      float lost[kQuad];
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kQuad; ++i) lost[i] = x.v[q * kQuad + i] - decoded.v[q * kQuad + i];
      if (whole) {
        StoreWholeQuad<DType::kF32>(lost, place, to_.residual);
      } else {
        StoreQuad<DType::kF32>(lost, place, to_.tile.numel, to_.residual);
      }
    }
  }

  // hadamard: transforms full blocks forward and back; the others are unchanged.
  THINWIRE_HD void Forward(PerThread<Values>& x, PerThread<Values>& y) {
    team_.ForEach([&](unsigned thread) { ApplySigns(codec_, thread, y[thread]); });
    TeamButterflies(team_, y);
    team_.ForEach([&](unsigned thread) {
      THINWIRE_UNROLL
      for (unsigned q = 0; q < kQuads; ++q) {
        if (!blocks_.Transforms(blocks_.Of(thread, q))) CopyQuad(x[thread], q, y[thread]);
      }
    });
  }

  THINWIRE_HD void Backward(PerThread<Values>& y) {
    PerThread<Values> back;
    PerThread<unsigned> quads;  // one bit each: those that were transformed
    team_.ForEach([&](unsigned thread) {
      back[thread] = y[thread];
      quads[thread] = TransformedQuads(thread);
    });
    TeamButterflies(team_, back);
    team_.ForEach([&](unsigned thread) {
      ApplySigns(codec_, thread, back[thread]);
      THINWIRE_UNROLL
      for (unsigned q = 0; q < kQuads; ++q) {
        if (quads[thread] >> q & 1) CopyQuad(back[thread], q, y[thread]);
      }
    });
  }

  THINWIRE_HD unsigned TransformedQuads(unsigned thread) {
    unsigned quads = 0;
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      const unsigned block = blocks_.Of(thread, q);
      if (!blocks_.Transforms(block)) continue;
      if (IsTransformed(scales_[thread].of[q].scale)) quads |= 1u << q;
    }
    return quads;
  }

  // Codecs of elements: each element separately; FORMAT.md has the rules for residuals.
  THINWIRE_HD void EncodeElements(unsigned thread, Values& x) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      const size_t place = to_.tile.Place(thread, q);
      float* v = x.v + q * kQuad;
      if (place * Traits::kBits / 8 >= to_.wire.bytes && place >= to_.tile.numel) continue;
      float lost[kQuad];  // not finite if v is not, or rounds to infinity
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kQuad; ++i) {
        const float decoded = Traits::Codec::ValueOf(Traits::Codec::CodeOf(v[i]));
        lost[i] = v[i] - decoded;
        v[i] = decoded;
      }
      if (to_.keeps_residual()) KeepFinite(lost, place);
      PutElements(place, v);
    }
  }

  // One store for a quad if all of it is kept and aligned.
  THINWIRE_HD void KeepFinite(const float* lost, size_t place) {
    bool all = to_.residual.quads && place + kQuad <= to_.tile.numel;
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) all &= IsFinite(lost[i]);
    if (all) return StoreWholeQuad<DType::kF32>(lost, place, to_.residual);
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) {
      if (!IsFinite(lost[i]) || place + i >= to_.tile.numel) continue;
      static_cast<float*>(to_.residual.data)[place + i] = lost[i];
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
  const TileBlocks<Traits> blocks_;
  PerThread<QuadScales> scales_;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_TILE_ENCODER_H_
