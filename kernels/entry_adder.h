// EntryAdder: sums the entries of several topk shards tile by tile, in shared memory: one pass over
// the result for any number of ranks.
//
// The bytes are unchecked, since the host does not have them. Malformed entries of a sub-block make
// its elements NaN, and wrong counts make all elements NaN, as a damaged scale does in other
// codecs; no access is out of bounds.
#ifndef THINWIRE_KERNELS_ENTRY_ADDER_H_
#define THINWIRE_KERNELS_ENTRY_ADDER_H_

#include "compress/codecs/topk.h"
#include "kernels/elements.h"
#include "kernels/entry_jobs.h"
#include "kernels/exact_float.h"
#include "kernels/team_sum.h"

namespace thinwire::kernels {

template <typename Team>
struct AdderShared {
  SumShared<Team> sums;
  typename Team::template Shared<float, kTile> sum;
  typename Team::template Shared<uint32_t, 1> malformed;
};

template <typename Team>
class EntryAdder {
  template <typename T>
  using PerThread = typename Team::template PerThread<T>;

 public:
  THINWIRE_HD EntryAdder(Team& team, AdderShared<Team>& shared, const AddEntriesLaunch& launch,
                         uint32_t tile)
      : team_(team),
        shared_(shared),
        launch_(launch),
        tile_{size_t{tile} * kTile, launch.numel},
        sub_block_(tile_.begin / kSubBlock) {}

  THINWIRE_HD void Run() {
    team_.ForEach([&](unsigned thread) {
      if (thread == 0) shared_.malformed.Put(team_, thread, 0, 0);
      Values values = {};
      if (launch_.use == EntryUse::kAdd)
        LoadValuesOf(launch_.dtype, launch_.out, tile_, thread, values);
      THINWIRE_UNROLL
      for (unsigned k = 0; k < kQuads * kQuad; ++k) {
        shared_.sum.Put(team_, thread, PlaceOf(thread, k / kQuad) + k % kQuad, values.v[k]);
      }
    });
    team_.Sync();
    bool sound = true;
    for (uint32_t rank = 0; rank < launch_.ranks && sound; ++rank) sound = AddShard(rank);
    team_.Sync();
    team_.ForEach([&](unsigned thread) {
      Values values;
      THINWIRE_UNROLL
      for (unsigned k = 0; k < kQuads * kQuad; ++k) {
        const unsigned place = PlaceOf(thread, k / kQuad) + k % kQuad;
        values.v[k] = sound ? shared_.sum.Get(team_, thread, place) : FloatOf(kDefaultNan);
      }
      StoreValuesOf(launch_.dtype, values, tile_, thread, launch_.out);
    });
  }

 private:
  // The entries of the tile's sub-block.
  struct Entries {
    const uint32_t* first;
    uint32_t count;
  };

  // False if the shard is malformed in a way that affects the tile.
  THINWIRE_HD bool AddShard(uint32_t rank) {
    const uint8_t* const wire = launch_.wires[rank];
    const auto* const counts = reinterpret_cast<const uint32_t*>(wire);
    uint32_t before = 0;
    if (!FindEntries(counts, &before)) return false;
    const Entries entries = {reinterpret_cast<const uint32_t*>(wire + launch_.codes_at) + before,
                             counts[sub_block_]};
    team_.ForEach([&](unsigned thread) { CheckEntries(thread, entries); });
    team_.Sync();
    if (!IsSound()) return false;
    team_.ForEach([&](unsigned thread) { AddEntries(thread, entries); });
    return true;
  }

  THINWIRE_HD uint32_t ElementsOf(size_t sub_block) const {
    const size_t rest = launch_.numel - sub_block * kSubBlock;
    return static_cast<uint32_t>(rest < kSubBlock ? rest : kSubBlock);
  }

  // True if the counts are valid; `before` is the number of entries of all earlier sub-blocks.
  THINWIRE_HD bool FindEntries(const uint32_t* counts, uint32_t* before) {
    PerThread<uint32_t> lower, lower_all, every, every_all;
    team_.ForEach([&](unsigned thread) {
      lower[thread] = every[thread] = 0;
      for (size_t b = thread; b * kSubBlock < launch_.numel; b += kThreads) {
        const uint32_t count = counts[b], most = ElementsOf(b);
        if (count > most) Refuse(thread);
        every[thread] += count > most ? 0 : count;
        if (b < sub_block_) lower[thread] += count;
      }
    });
    ExclusiveSum(team_, shared_.sums, lower, lower_all);
    ExclusiveSum(team_, shared_.sums, every, every_all);
    team_.ForEach([&](unsigned thread) {
      *before = lower_all[thread];
      if (thread == 0 && every_all[thread] != launch_.entries) Refuse(thread);
    });
    team_.Sync();
    return IsSound();
  }

  // Indices ascend and are below the sub-block's end, so no two threads add to one element.
  THINWIRE_HD void CheckEntries(unsigned thread, const Entries& entries) {
    const uint32_t elements = ElementsOf(sub_block_);
    for (uint32_t e = thread; e < entries.count; e += kThreads) {
      const size_t index = EntryIndex(entries.first[e]);
      const bool ascends = e == 0 || index > EntryIndex(entries.first[e - 1]);
      if (index >= elements || !ascends) Refuse(thread);
    }
  }

  // For a sum, entries of 0 are skipped, so that the sum keeps even a -0.
  THINWIRE_HD void AddEntries(unsigned thread, const Entries& entries) {
    const size_t begin = tile_.begin % kSubBlock;
    const bool adds = launch_.use != EntryUse::kValues;
    for (uint32_t e = thread; e < entries.count; e += kThreads) {
      const uint32_t entry = entries.first[e];
      const size_t index = EntryIndex(entry);
      const float value = EntryValue(entry);
      if (index < begin || index - begin >= kTile || (adds && value == 0.0f)) continue;
      const auto place = static_cast<unsigned>(index - begin);
      const float sum = shared_.sum.Get(team_, thread, place);
      shared_.sum.Put(team_, thread, place, adds ? Add(sum, Mul(launch_.factor, value)) : value);
    }
  }

  THINWIRE_HD void Refuse(unsigned thread) { shared_.malformed.Add(team_, thread, 0, 1); }
  // Call it after a Sync; it syncs again before the next Refuse.
  THINWIRE_HD bool IsSound() {
    bool sound = true;
    team_.ForEach([&](unsigned thread) { sound = shared_.malformed.Get(team_, thread, 0) == 0; });
    team_.Sync();
    return sound;
  }

  Team& team_;
  AdderShared<Team>& shared_;
  const AddEntriesLaunch& launch_;
  const TileRange tile_;
  const size_t sub_block_;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_ENTRY_ADDER_H_
