// The reduction of a tile: sum over ranks in rank order, mean, second-hop residual, encoding,
// result.
//
// A rank's wire has few bytes of a tile, so a team that waited for each rank's bytes would leave
// memory idle. Codes and scales of the next ranks are fetched into shared memory while those of one
// rank are summed. Each warp fetches what its own threads decode, so no warp waits for another.
#ifndef THINWIRE_KERNELS_TILE_REDUCER_H_
#define THINWIRE_KERNELS_TILE_REDUCER_H_

#include "kernels/tiles.h"

namespace thinwire::kernels {

// The layout of a warp's bytes in a stage, which holds those of one rank's wire.
template <typename Traits>
struct StageLayout {
  static constexpr unsigned kElements = kWarpElements;
  static constexpr unsigned kChunk = 16;  // bytes that a thread fetches at once
  // The number of smallest blocks in a warp: it fetches an aligned group of four scales, which
  // contains those that it needs. The wire's scales are padded to 16 bytes.
  static constexpr unsigned kScales = kElements / kMinBlock;
  static constexpr unsigned kScalesBytes = kScales * sizeof(uint16_t);
  static constexpr unsigned kCodesBytes = kElements * Traits::kBits / 8;
  static constexpr unsigned kWarpBytes = kCodesBytes + kChunk;
  static constexpr unsigned kBytes = kThreads / kWarp * kWarpBytes;
  static_assert(kScalesBytes == 8 && kCodesBytes % kChunk == 0);
  static_assert(Traits::kElements || kCodesBytes <= kWarp * kChunk, "a thread fetches once");
};

// Stages of a reduction: all but one are in flight. Codecs of elements need none: each thread
// already has 32 or 64 bytes of one rank in flight.
inline constexpr unsigned kStages = 4;

template <typename Up>
constexpr unsigned StageBytes() {
  return Up::kElements ? 1 : kStages * StageLayout<Up>::kBytes;
}

// Where a thread fetches from and to, and where it finds its quads, for any rank.
struct StagePlaces {
  size_t codes_from;  // in a wire
  uint32_t scales_from;
  bool fetches_codes, fetches_scales;
  unsigned codes_to, scales_to;  // in a stage
  unsigned codes, scales;        // in a stage: those of the first quad
};

template <typename Traits>
THINWIRE_HD StagePlaces StagePlacesOf(const ReduceLaunch& launch, const TileRange& tile,
                                      unsigned thread) {
  using Layout = StageLayout<Traits>;
  const unsigned warp = thread / kWarp, lane = thread % kWarp, at = warp * Layout::kWarpBytes;
  const uint32_t block_bits = launch.up.block_bits;
  const size_t first = tile.begin + warp * Layout::kElements;
  const unsigned own = lane * Layout::kChunk;
  const size_t slot = first >> block_bits, group = slot / Layout::kScales * Layout::kScales;
  StagePlaces places;
  places.codes_from = launch.up_codes_at + CodeBytes<Traits>(first) + own;
  places.scales_from = static_cast<uint32_t>(group * sizeof(uint16_t));  // below 2^38 elements
  places.fetches_codes = own < Layout::kCodesBytes && first + own * 8 / Traits::kBits < tile.numel;
  places.fetches_scales = lane == kWarp - 1 && first < tile.numel;
  places.codes_to = at + own;
  places.scales_to = at + Layout::kCodesBytes;
  places.codes = at + CodeBytes<Traits>(lane * kQuad);
  places.scales = places.scales_to + static_cast<unsigned>(slot - group) * sizeof(uint16_t);
  return places;
}

// One rank's codes and scales in a stage.
template <typename Team, typename Traits>
class ShardInStage {
  using Layout = StageLayout<Traits>;
  using Stages = typename Team::template Staged<StageBytes<Traits>()>;
  using Places = typename Team::template PerThread<StagePlaces>;

 public:
  THINWIRE_HD ShardInStage(Stages& stages, Places& places, const Codec& codec, unsigned rank)
      : stages_(stages),
        places_(places),
        block_bits_(codec.block_bits),
        begin_(rank % kStages * Layout::kBytes) {}

  // Begins to fetch a thread's part of its warp's bytes.
  THINWIRE_HD void Fetch(Team& team, unsigned thread, const uint8_t* wire) const {
    const StagePlaces& places = places_[thread];
    if (places.fetches_codes) {
      stages_.template Fetch<Layout::kChunk>(team, thread, begin_ + places.codes_to,
                                             wire + places.codes_from);
    }
    if (places.fetches_scales) {
      stages_.template Fetch<Layout::kScalesBytes>(team, thread, begin_ + places.scales_to,
                                                   wire + places.scales_from);
    }
  }

  template <unsigned kBytes>
  THINWIRE_HD void Load(Team& team, unsigned thread, unsigned quad, void* codes) const {
    const unsigned at = places_[thread].codes + CodeBytes<Traits>(quad * kGroup);
    stages_.template Get<kBytes>(team, thread, begin_ + at, codes);
  }
  THINWIRE_HD float Scale(Team& team, unsigned thread, unsigned quad) const {
    alignas(2) uint16_t scale;
    const unsigned block = quad * kGroup >> block_bits_;  // a group is no larger than a block
    const unsigned at = places_[thread].scales + block * sizeof(scale);
    stages_.template Get<sizeof(scale)>(team, thread, begin_ + at, &scale);
    return FromBf16(scale);
  }

 private:
  Stages& stages_;
  Places& places_;
  const uint32_t block_bits_;
  const unsigned begin_;  // of the stage
};

// The sum over the ranks of a tile, in rank order; zeros after the last element. `Up`: the Variant
// of the wires; `kDType`: that of this rank's own shard.
template <typename Team, typename Up, DType kDType>
class RankSum {
  using Sums = typename Team::template PerThread<Values>;
  using Stages = typename Team::template Staged<StageBytes<Up>()>;
  // True if sums ignore the bits of NaNs, and a sum that is NaN is recomputed exactly. With a
  // transform a thread can't do that alone, and codecs of elements are limited by memory anyway.
  static constexpr bool kRepeats = !Up::kElements && !Up::kHadamard;

 public:
  THINWIRE_HD RankSum(Team& team, Stages& stages, const ReduceLaunch& launch, const TileRange& tile)
      : team_(team), stages_(stages), launch_(launch), tile_(tile) {}

  THINWIRE_HD void Run(Sums& sum) {
    if constexpr (!Up::kElements) {
      team_.ForEach(
          [&](unsigned thread) { places_[thread] = StagePlacesOf<Up>(launch_, tile_, thread); });
      for (uint32_t rank = 0; rank + 1 < kStages; ++rank) Fetch(rank);
    }
    if constexpr (kRepeats) {
      team_.ForEach([&](unsigned thread) { Clear(sum[thread]); });
    }
    THINWIRE_ROLL
    for (uint32_t rank = 0; rank < launch_.ranks; ++rank) {
      if constexpr (!Up::kElements) {
        team_.template AwaitFetches<kStages - 2>();
        team_.SyncWarp();  // all lanes' bytes are here, and the previous stage is free
        Fetch(rank + kStages - 1);
      }
      Add(rank, sum);
    }
    if constexpr (kRepeats) {
      team_.ForEach([&](unsigned thread) {
        if (HasNan(sum[thread])) SumExactly(thread, sum[thread]);
      });
    }
  }

 private:
  // One group of fetches for each rank, even if there is nothing to fetch.
  THINWIRE_HD void Fetch(uint32_t rank) {
    const uint8_t* const wire = rank < launch_.ranks ? launch_.wires[rank] : nullptr;
    if (wire != nullptr) {
      const ShardInStage<Team, Up> stage(stages_, places_, launch_.up, rank);
      team_.ForEach([&](unsigned thread) { stage.Fetch(team_, thread, wire); });
    }
    team_.CommitFetches();
  }

  // -0 changes no sum, not even the sign of a zero.
  THINWIRE_HD static void Clear(Values& sum) {
    THINWIRE_UNROLL
    for (float& v : sum.v) v = -0.0f;
  }

  // Adds one rank's values. Exact sums begin with the first rank's values, since initial zeros
  // would take registers that they need.
  THINWIRE_HD void Add(uint32_t rank, Sums& sum) {
    const uint8_t* const wire = launch_.wires[rank];
    Sums value;
    if (wire == nullptr) {
      team_.ForEach(
          [&](unsigned thread) { LoadValues<kDType>(launch_.own, tile_, thread, value[thread]); });
    } else if constexpr (Up::kElements) {
      Decode(ShardInMemory<Team, Up>(launch_.up, wire, launch_.up_codes_at, tile_), value);
    } else {
      Decode(ShardInStage<Team, Up>(stages_, places_, launch_.up, rank), value);
    }
    team_.ForEach([&](unsigned thread) {
      if constexpr (kRepeats) {
        AddNumbers(sum[thread], value[thread]);
      } else if (rank == 0) {
        sum[thread] = value[thread];
      } else {
        AddValues(sum[thread], value[thread]);
      }
    });
  }

  template <typename Source>
  THINWIRE_HD void Decode(const Source& source, Sums& value) {
    TileDecoder<Team, Up, Source> decoder(team_, launch_.up, source, tile_);
    if constexpr (kRepeats) {
      team_.ForEach(
          [&](unsigned thread) { decoder.template Decode<Nans::kAny>(thread, value[thread]); });
    } else {
      decoder.Run(value);
    }
  }

  // One thread's exact sum, directly from the wires in memory. Rarely needed.
  THINWIRE_HD void SumExactly(unsigned thread, Values& sum) {
    using Shard = ShardInMemory<Team, Up>;
    Clear(sum);
    THINWIRE_ROLL
    for (uint32_t rank = 0; rank < launch_.ranks; ++rank) {
      const uint8_t* const wire = launch_.wires[rank];
      Values value;
      if (wire == nullptr) {
        LoadValues<kDType>(launch_.own, tile_, thread, value);
      } else {
        const Shard shard(launch_.up, wire, launch_.up_codes_at, tile_);
        TileDecoder<Team, Up, Shard>(team_, launch_.up, shard, tile_)
            .template Decode<Nans::kExact>(thread, value);
      }
      AddValues(sum, value);
    }
  }

  Team& team_;
  Stages& stages_;
  const ReduceLaunch& launch_;
  const TileRange tile_;
  typename Team::template PerThread<StagePlaces> places_;
};

template <typename Team, typename Up, typename Down>
struct ReduceShared {
  EncoderShared<Team, Down> encoder;
  typename Team::template Staged<StageBytes<Up>()> stages;
};

template <typename Team, typename Up, typename Down, DType kDType>
THINWIRE_HD void ReduceTile(Team& team, ReduceShared<Team, Up, Down>& shared,
                            const ReduceLaunch& launch, uint32_t number) {
  const unsigned size = TileOf(launch.threads);
  const TileRange tile{size_t{number} * size, launch.numel, size};
  typename Team::template PerThread<Values> sum;
  RankSum<Team, Up, kDType>(team, shared.stages, launch, tile).Run(sum);
  team.ForEach([&](unsigned thread) {
    ScaleValues(launch.scale, sum[thread]);
    AddResidual(launch.residual, tile, thread, sum[thread]);
  });
  const EncodeTarget target{launch.wire_out, launch.residual, true, tile};
  TileEncoder<Team, Down>(team, shared.encoder, launch.down, target).Run(sum);
  team.ForEach(
      [&](unsigned thread) { StoreValues<kDType>(sum[thread], tile, thread, launch.out); });
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_TILE_REDUCER_H_
