// TileDecoder: from the wire bytes of a tile to the values that a team holds.
#ifndef THINWIRE_KERNELS_TILE_DECODER_H_
#define THINWIRE_KERNELS_TILE_DECODER_H_

#include "kernels/codes.h"
#include "kernels/transform.h"

namespace thinwire::kernels {

template <typename Team, typename Traits>
class TileDecoder {
  template <typename T>
  using PerThread = typename Team::template PerThread<T>;

 public:
  THINWIRE_HD TileDecoder(Team& team, const Codec& codec, const uint8_t* wire, size_t codes_at,
                          const TileRange& tile)
      : team_(team), codec_(codec), wire_(wire), codes_at_(codes_at), tile_(tile) {}

  // Zeros behind the last element.
  THINWIRE_HD void Run(PerThread<Values>& out) {
    team_.ForEach([&](unsigned thread) {
      if (tile_.full()) {
        THINWIRE_UNROLL
        for (unsigned q = 0; q < kQuads; ++q) {
          const size_t place = tile_.begin + PlaceOf(thread, q);
          DecodeQuad<Traits>(wire_ + codes_at_, place, ScaleOf(place), out[thread].v + q * kQuad);
        }
        return;
      }
      THINWIRE_UNROLL
      for (unsigned q = 0; q < kQuads; ++q) {
        const size_t place = tile_.begin + PlaceOf(thread, q);
        float* v = out[thread].v + q * kQuad;
        if (place < tile_.numel) DecodeQuad<Traits>(wire_ + codes_at_, place, ScaleOf(place), v);
        THINWIRE_UNROLL
        for (unsigned i = 0; i < kQuad; ++i) v[i] = place + i < tile_.numel ? v[i] : 0.0f;
      }
    });
    if constexpr (Traits::kHadamard) Backward(out);
  }

 private:
  THINWIRE_HD float ScaleOf(size_t place) const {
    if constexpr (Traits::kElements) return 1.0f;
    return FromBf16(reinterpret_cast<const uint16_t*>(wire_)[place >> codec_.block_bits]);
  }

  THINWIRE_HD bool IsBack(size_t place) const {
    const size_t end = place / kTransform * kTransform + kTransform;
    return end <= tile_.numel && IsTransformed(ScaleOf(place));
  }

  THINWIRE_HD void Backward(PerThread<Values>& out) {
    PerThread<Values> back;
    team_.ForEach([&](unsigned thread) { back[thread] = out[thread]; });
    TeamButterflies(team_, back);
    team_.ForEach([&](unsigned thread) {
      ApplySigns(codec_, thread, back[thread]);
      THINWIRE_UNROLL
      for (unsigned q = 0; q < kQuads; ++q) {
        if (IsBack(tile_.begin + PlaceOf(thread, q))) CopyQuad(back[thread], q, out[thread]);
      }
    });
  }

  Team& team_;
  const Codec& codec_;
  const uint8_t* const wire_;
  const size_t codes_at_;
  const TileRange tile_;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_TILE_DECODER_H_
