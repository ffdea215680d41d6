// The work of a team on one tile, for each operation, from loads to stores: the kernels without
// their launches. Each makes one pass over the data. Reductions are in tile_reducer.h.
#ifndef THINWIRE_KERNELS_TILES_H_
#define THINWIRE_KERNELS_TILES_H_

#include "kernels/exact_sums.h"
#include "kernels/tile_decoder.h"
#include "kernels/tile_encoder.h"

namespace thinwire::kernels {

// The job to which a tile of a launch belongs, by bisection: the last one that begins at or before
// it. Each step waits for the one before, so a linear search of 31 steps would take as long as a
// tile's loads.
template <typename JobTable>
THINWIRE_HD uint32_t JobOf(const JobTable& jobs, uint32_t tile) {
  uint32_t job = 0, behind = jobs.count;
  while (behind - job > 1) {
    const uint32_t middle = (job + behind) / 2;
    (jobs.job[middle].first_tile > tile ? behind : job) = middle;
  }
  return job;
}

template <typename Job>
THINWIRE_HD TileRange RangeOf(const Job& job, uint32_t tile, unsigned threads) {
  return {size_t{tile - job.first_tile} * TileOf(threads), job.numel, TileOf(threads)};
}

// Replaces the gradient by the momentum that the engine keeps, if it keeps one.
THINWIRE_HD void AddVelocity(const EncodeJob& job, const TileRange& tile, unsigned thread,
                             Values& x) {
  if (job.velocity.data == nullptr) return;
  Values velocity;
  LoadValues<DType::kF32>(job.velocity, tile, thread, velocity);
  AddScaled(job.beta, velocity, x);
}

// No-op without feedback.
THINWIRE_HD void AddResidual(const Elements& residual, const TileRange& tile, unsigned thread,
                             Values& x) {
  if (residual.data == nullptr) return;
  Values lost;
  LoadValues<DType::kF32>(residual, tile, thread, lost);
  AddValues(x, lost);
}

// x: the gradient or the momentum, plus the residual.
template <DType kDType, typename Team>
THINWIRE_HD void LoadCorrected(Team& team, const EncodeJob& job, const TileRange& tile,
                               typename Team::template PerThread<Values>& x) {
  team.ForEach([&](unsigned thread) {
    LoadValues<kDType>(job.gradient, tile, thread, x[thread]);
    AddVelocity(job, tile, thread, x[thread]);
    AddResidual(job.residual, tile, thread, x[thread]);
  });
}

template <typename Team, typename Traits, DType kDType>
THINWIRE_HD void EncodeTile(Team& team, EncoderShared<Team, Traits>& shared,
                            const EncodeLaunch& launch, uint32_t tile_of_launch) {
  const EncodeJob& job = launch.jobs.job[JobOf(launch.jobs, tile_of_launch)];
  const TileRange tile = RangeOf(job, tile_of_launch, launch.jobs.threads);
  typename Team::template PerThread<Values> x;
  LoadCorrected<kDType>(team, job, tile, x);
  const EncodeTarget target{job.wire, job.residual, false, tile};
  TileEncoder<Team, Traits>(team, shared, launch.codec, target).Run(x);
}

// Writes the decoded values, or adds them to `out`.
template <typename Team, DType kDType, bool kAdd>
THINWIRE_HD void StoreDecoded(Team& team, typename Team::template PerThread<Values>& values,
                              const TileRange& tile, const Elements& out) {
  team.ForEach([&](unsigned thread) {
    if constexpr (kAdd) {
      Values sum;
      LoadValues<kDType>(out, tile, thread, sum);
      AddValues(sum, values[thread]);
      values[thread] = sum;
    }
    StoreValues<kDType>(values[thread], tile, thread, out);
  });
}

template <typename Team, typename Traits, DType kDType, bool kAdd>
THINWIRE_HD void DecodeTile(Team& team, const DecodeLaunch& launch, uint32_t tile_of_launch) {
  const DecodeJob& job = launch.jobs.job[JobOf(launch.jobs, tile_of_launch)];
  const TileRange tile = RangeOf(job, tile_of_launch, launch.jobs.threads);
  typename Team::template PerThread<Values> values;
  using Shard = ShardInMemory<Team, Traits>;
  const Shard shard(launch.codec, job.wire.data, job.wire.codes_at, tile);
  TileDecoder<Team, Traits, Shard>(team, launch.codec, shard, tile).Run(values);
  StoreDecoded<Team, kDType, kAdd>(team, values, tile, job.out);
}

template <typename Team, DType kDType>
THINWIRE_HD void AccumulateTile(Team& team, const AccumulateLaunch& launch,
                                uint32_t tile_of_launch) {
  const AccumulateJob& job = launch.jobs.job[JobOf(launch.jobs, tile_of_launch)];
  const TileRange tile = RangeOf(job, tile_of_launch, launch.jobs.threads);
  team.ForEach([&](unsigned thread) {
    Values base, sum;
    LoadValues<DType::kF32>(job.base, tile, thread, base);
    LoadValues<kDType>(job.gradient, tile, thread, sum);
    AddScaled(job.factor, base, sum);
    StoreValues<DType::kF32>(sum, tile, thread, job.sum);
  });
}

template <typename Team>
THINWIRE_HD void EndMomentumTile(Team& team, const MomentumLaunch& launch,
                                 uint32_t tile_of_launch) {
  const MomentumJob& job = launch.jobs.job[JobOf(launch.jobs, tile_of_launch)];
  const TileRange tile = RangeOf(job, tile_of_launch, launch.jobs.threads);
  team.ForEach([&](unsigned thread) {
    Values m, velocity;
    LoadValues<DType::kF32>(job.m, tile, thread, m);
    LoadValues<DType::kF32>(job.velocity, tile, thread, velocity);
    THINWIRE_UNROLL
    for (unsigned k = 0; k < kQuads * kQuad; ++k) {
      const float last = velocity.v[k];
      if (IsFinite(m.v[k])) velocity.v[k] = m.v[k];
      if (!launch.nesterov) continue;
      const float g = Add(Mul(-launch.beta, last), m.v[k]);
      m.v[k] = Add(Mul(launch.beta, m.v[k]), g);
    }
    StoreValues<DType::kF32>(velocity, tile, thread, job.velocity);
    if (job.out.data != nullptr) StoreValuesOf(launch.dtype, m, tile, thread, job.out);
  });
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_TILES_H_
