// TileEncoder: from the x of a tile to wire bytes, residual and decoded values, in the order of its
// life: scales, codes, values, loss.
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

  // x: gradient + residual, zeros behind the last element. Leaves the decoded values there.
  THINWIRE_HD void Run(PerThread<Values>& x) {
    if constexpr (Traits::kElements) {
      team_.ForEach([&](unsigned thread) { EncodeElements(thread, x[thread]); });
    } else {
      PerThread<Values> y;  // what is quantised
      team_.ForEach([&](unsigned thread) { y[thread] = x[thread]; });
      if constexpr (Traits::kHadamard) Forward(x, y);
      TileScales<Team, Traits>(team_, shared_, codec_, to_).Run(y);
      Codes(y);
      if constexpr (Traits::kHadamard) Backward(y);
      team_.ForEach([&](unsigned thread) {
        if (to_.keeps_residual()) KeepResidual(thread, x[thread], y[thread]);
        x[thread] = y[thread];
      });
    }
  }

 private:
  // Codes to the wire; y becomes their values.
  THINWIRE_HD void Codes(PerThread<Values>& y) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      PerThread<uint32_t> word;
      team_.ForEach([&](unsigned thread) {
        const size_t place = to_.tile.Place(thread, q);
        word[thread] = 0;
        if (place >= to_.tile.numel) return;
        const BlockScale block = shared_.scales.Get(team_, thread, blocks_.Of(thread, q));
        float* v = y[thread].v + q * kQuad;
        int codes[kQuad];
        MakeCodes(v, block.inverse, codes);
        THINWIRE_UNROLL
        for (unsigned i = 0; i < kQuad; ++i) v[i] = FloatOfCode(codes[i]);
        ScaleQuad(block.scale, v);
        word[thread] = PackWord(codes);
      });
      if constexpr (Traits::kSigns) MergeBits(word);
      if (to_.wire.data == nullptr) continue;
      team_.ForEach([&](unsigned thread) { PutCodes(thread, q, word[thread]); });
    }
  }

  // A sign takes a choice, and a conversion would come on top of that.
  THINWIRE_HD static float FloatOfCode(int code) {
    if constexpr (Traits::kSigns) return code < 0 ? -1.0f : 1.0f;
    return static_cast<float>(code);
  }

  // A quad lies in one block, so it takes one decision and not four.
  THINWIRE_HD static void MakeCodes(const float* x, float inverse, int* codes) {
    using Codec = typename Traits::Codec;
    if (inverse == 0.0f) {
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kQuad; ++i) codes[i] = Codec::kTinyCode;
      return;
    }
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) codes[i] = Codec::CodeFor(x[i], inverse);
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
    const size_t at = to_.wire.codes_at + (to_.tile.Place(thread, quad)) * Traits::kBits / 8;
    if (at >= to_.wire.bytes || (Traits::kSigns && thread % 8 != 0)) return;
    CopyWord<kBytes>(to_.wire.data + at, &word);
  }

  // The loss. A block that is not finite leaves its residual as it was.
  THINWIRE_HD void KeepResidual(unsigned thread, const Values& x, const Values& decoded) {
    const bool whole = to_.tile.full() && to_.residual.quads;
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      const size_t place = to_.tile.Place(thread, q);
      if (place >= to_.tile.numel) continue;
      if (IsNan(shared_.scales.Get(team_, thread, blocks_.Of(thread, q)).scale)) continue;
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

  // hadamard: full blocks there and back; the others stay as they are.
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
    PerThread<unsigned> quads;  // a bit each: those that were there
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

  THINWIRE_HD unsigned TransformedQuads(unsigned thread) const {
    unsigned quads = 0;
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      const unsigned block = blocks_.Of(thread, q);
      if (!blocks_.Transforms(block)) continue;
      if (IsTransformed(shared_.scales.Get(team_, thread, block).scale)) quads |= 1u << q;
    }
    return quads;
  }

  // Codecs of elements: each for itself; the rules for residuals are FORMAT.md's.
  THINWIRE_HD void EncodeElements(unsigned thread, Values& x) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      const size_t place = to_.tile.Place(thread, q);
      float* v = x.v + q * kQuad;
      if (place * Traits::kBits / 8 >= to_.wire.bytes && place >= to_.tile.numel) continue;
      float lost[kQuad];  // not finite where v is not, or rounds to infinity
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

  // A quad is one store where all of it is kept and aligned.
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
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_TILE_ENCODER_H_
