// TileDecoder: decodes the wire bytes of a tile to the values that a team holds.
#ifndef THINWIRE_KERNELS_TILE_DECODER_H_
#define THINWIRE_KERNELS_TILE_DECODER_H_

#include "kernels/codes.h"
#include "kernels/transform.h"

namespace thinwire::kernels {

// Reads a shard's codes and scales from device memory, by quads of a tile.
template <typename Team, typename Traits>
class ShardInMemory {
 public:
  THINWIRE_HD ShardInMemory(const Codec& codec, const uint8_t* wire, size_t codes_at,
                            const TileRange& tile)
      : wire_(wire), codes_at_(codes_at), block_bits_(codec.block_bits), tile_(tile) {}

  template <unsigned kBytes>
  THINWIRE_HD void Load(Team&, unsigned thread, unsigned quad, void* codes) const {
    const uint8_t* const first = wire_ + codes_at_ + CodeBytes<Traits>(tile_.Place(thread, 0));
    CopyWord<kBytes>(codes, first + CodeBytes<Traits>(quad * kGroup));
  }
  THINWIRE_HD float Scale(Team&, unsigned thread, unsigned quad) const {
    if constexpr (Traits::kElements) return 1.0f;
    const size_t block = tile_.Place(thread, quad) >> block_bits_;
    return FromBf16(reinterpret_cast<const uint16_t*>(wire_)[block]);
  }

 private:
  const uint8_t* const wire_;
  const size_t codes_at_;
  const uint32_t block_bits_;
  const TileRange tile_;
};

// `Source`: reads codes and scales, like ShardInMemory.
template <typename Team, typename Traits, typename Source>
class TileDecoder {
  template <typename T>
  using PerThread = typename Team::template PerThread<T>;

 public:
  THINWIRE_HD TileDecoder(Team& team, const Codec& codec, const Source& source,
                          const TileRange& tile)
      : team_(team), codec_(codec), source_(source), tile_(tile) {}

  // Zeros after the last element.
  THINWIRE_HD void Run(PerThread<Values>& out) {
    team_.ForEach([&](unsigned thread) { Decode<Nans::kExact>(thread, out[thread]); });
    if constexpr (Traits::kHadamard) Backward(out);
  }

  // A thread's part of Run, without the transform.
  template <Nans kNans>
  THINWIRE_HD void Decode(unsigned thread, Values& out) {
    if (tile_.full()) {
      THINWIRE_UNROLL
      for (unsigned q = 0; q < kQuads; ++q) Decode<kNans>(thread, q, out.v + q * kQuad);
      return;
    }
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      const size_t place = tile_.Place(thread, q);
      float* v = out.v + q * kQuad;
      if (place < tile_.numel) Decode<kNans>(thread, q, v);
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kQuad; ++i) v[i] = place + i < tile_.numel ? v[i] : 0.0f;
    }
  }

 private:
  template <Nans kNans>
  THINWIRE_HD void Decode(unsigned thread, unsigned quad, float* out) {
    const auto load = [&]<unsigned kBytes>(void* codes) {
      source_.template Load<kBytes>(team_, thread, quad, codes);
    };
    const float scale = source_.Scale(team_, thread, quad);
    DecodeQuad<Traits, kNans>(load, PlaceOf(thread, quad), scale, out);
  }

  THINWIRE_HD bool IsBack(unsigned thread, unsigned quad) {
    const size_t place = tile_.Place(thread, quad);
    const size_t end = place / kTransform * kTransform + kTransform;
    return end <= tile_.numel && IsTransformed(source_.Scale(team_, thread, quad));
  }

  THINWIRE_HD void Backward(PerThread<Values>& out) {
    PerThread<Values> back;
    team_.ForEach([&](unsigned thread) { back[thread] = out[thread]; });
    TeamButterflies(team_, back);
    team_.ForEach([&](unsigned thread) {
      ApplySigns(codec_, thread, back[thread]);
      THINWIRE_UNROLL
      for (unsigned q = 0; q < kQuads; ++q) {
        if (IsBack(thread, q)) CopyQuad(back[thread], q, out[thread]);
      }
    });
  }

  Team& team_;
  const Codec& codec_;
  const Source source_;
  const TileRange tile_;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_TILE_DECODER_H_
