// The work of a team on one tile for codecs of widths, like tiles.h for other codecs.
#ifndef THINWIRE_KERNELS_WIDTHS_TILES_H_
#define THINWIRE_KERNELS_WIDTHS_TILES_H_

#include "kernels/tiles.h"
#include "kernels/widths_encoder.h"
#include "kernels/widths_heads.h"

namespace thinwire::kernels {

template <typename Team, DType kDType>
THINWIRE_HD void EncodeHeadsTile(Team& team, HeadsShared<Team>& shared, const EncodeLaunch& launch,
                                 uint32_t tile_of_launch) {
  const EncodeJob& job = launch.jobs.job[JobOf(launch.jobs, tile_of_launch)];
  const TileRange tile = RangeOf(job, tile_of_launch, kThreads);
  typename Team::template PerThread<Values> x;
  LoadCorrected<kDType>(team, job, tile, x);
  typename Team::template PerThread<Heads> heads;
  TileHeads<Team>(team, shared).Run(x, heads);
  PutHeads(team, heads, job.wire, tile);
  if (job.residual.data != nullptr) KeepFinite(team, x, heads, tile, job.residual);
}

// With a residual, x is read from it.
template <typename Team, DType kDType>
THINWIRE_HD void EncodeCodesTile(Team& team, const EncodeLaunch& launch, const WidthsPlan* plans,
                                 uint32_t tile_of_launch) {
  const uint32_t number = JobOf(launch.jobs, tile_of_launch);
  const EncodeJob& job = launch.jobs.job[number];
  const TileRange tile = RangeOf(job, tile_of_launch, kThreads);
  const bool feedback = job.residual.data != nullptr;
  typename Team::template PerThread<Values> x, y;
  if (feedback) {
    team.ForEach(
        [&](unsigned thread) { LoadValues<DType::kF32>(job.residual, tile, thread, x[thread]); });
  } else {
    LoadCorrected<kDType>(team, job, tile, x);
  }
  WidthsEncoder<Team> encoder(team, launch.codec, job.wire, tile, plans[number]);
  encoder.Run(x, y);
  if (!feedback) return;
  encoder.Decode(y);
  encoder.KeepResidual(x, y, job.residual);
}

template <typename Team, DType kDType, bool kAdd>
THINWIRE_HD void DecodeWidthsTile(Team& team, const DecodeLaunch& launch, const WidthsPlan* plans,
                                  uint32_t tile_of_launch) {
  const uint32_t number = JobOf(launch.jobs, tile_of_launch);
  const DecodeJob& job = launch.jobs.job[number];
  const TileRange tile = RangeOf(job, tile_of_launch, kThreads);
  typename Team::template PerThread<Values> values;
  WidthsDecoder<Team>(team, launch.codec, job.wire.data, job.wire.codes_at, tile, plans[number])
      .Run(values);
  StoreDecoded<Team, kDType, kAdd>(team, values, tile, job.out);
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_WIDTHS_TILES_H_
