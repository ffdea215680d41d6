// EntryEncoder: the exact k largest elements, as topk's wire bytes; the kernels in the order in
// which they run.
//
// The scan is the one pass over the data: it adds gradient, momentum and residual, stores them, and
// lists what reaches the threshold of the last step. While that holds, all else works on the list,
// which has little more than k candidates. Where it does not (the first step, a sudden change) the
// others read the residual in place of the list: the result is the same. Nobody tells the host, so
// that all of it can be captured in a graph.
#ifndef THINWIRE_KERNELS_ENTRY_ENCODER_H_
#define THINWIRE_KERNELS_ENTRY_ENCODER_H_

#include "kernels/entry_digits.h"
#include "kernels/entry_offsets.h"
#include "kernels/entry_source.h"
#include "kernels/quad_ranks.h"

namespace thinwire::kernels {

template <typename Team>
struct EntryShared {
  typename EntryDigits<Team>::Shared digits;
  SumShared<Team> sums;
  QuadShared<Team> quads;
  typename Team::template Shared<uint32_t, 1> not_finite;
  typename Team::template Shared<uint32_t, 1> first;
};

template <typename Team>
class EntryEncoder {
  template <typename T>
  using PerThread = typename Team::template PerThread<T>;
  // The kernels whose last team goes on with what all have found.
  static constexpr unsigned kScanned = kDigits, kCounted = kDigits + 1;

 public:
  THINWIRE_HD EntryEncoder(Team& team, EntryShared<Team>& shared, const EncodeEntriesLaunch& launch)
      : team_(team), shared_(shared), launch_(launch) {}

  // (1) By one team: the state is zero.
  THINWIRE_HD void Begin() {
    team_.ForEach([&](unsigned thread) {
      auto* const words = reinterpret_cast<uint32_t*>(launch_.room.state);
      for (unsigned i = thread; i < sizeof(EntryState) / sizeof(uint32_t); i += kThreads) {
        words[i] = 0;
      }
      if (thread == 0 && launch_.threshold != nullptr) {
        launch_.room.state->low = CarriedKey(*launch_.threshold);
      }
    });
  }

  // (2) x to the residual, the candidates to the list, their first digits counted.
  THINWIRE_HD void Scan(uint32_t number) {
    const EntrySource source(launch_, number);
    EntryDigits<Team> digits = DigitsOf(0);
    PerThread<EntryItems> items;
    PerThread<Values> u;
    PerThread<QuadCounts> ranks;
    PerThread<uint32_t> hits, all;
    digits.Clear();
    team_.ForEach([&](unsigned thread) {
      if (thread == 0) shared_.not_finite.Put(team_, thread, 0, 0);
    });
    team_.Sync();
    team_.ForEach([&](unsigned thread) {
      source.Make(thread, items[thread], u[thread]);
      hits[thread] = Mark(thread, items[thread], digits);
      CountMarks(hits[thread], ranks[thread]);
    });
    RankQuads(team_, shared_.quads, shared_.sums, ranks, all);
    bool kept = false;
    team_.ForEach([&](unsigned thread) {
      kept = launch_.residual.data != nullptr && shared_.not_finite.Get(team_, thread, 0) == 0;
      if (thread == 0) shared_.first.Put(team_, thread, 0, TakeRoom(source, kept, all[thread]));
    });
    team_.Sync();
    team_.ForEach([&](unsigned thread) {
      if (!kept) return;
      StoreValues<DType::kF32>(items[thread].x, source.tile(), thread, launch_.residual);
      if (launch_.velocity.data != nullptr) {
        StoreValues<DType::kF32>(u[thread], source.tile(), thread, launch_.velocity);
      }
      const uint32_t first = shared_.first.Get(team_, thread, 0);
      if (first >= EntryTile::kAnew) return;
      List(thread, items[thread], hits[thread], ranks[thread], first, source.tile().begin);
    });
    digits.Flush();
    if (!IsLastTeam(team_, shared_.sums, &state().finished[kScanned], launch_.tiles)) return;
    if (Team::Fresh(&state().found) >= launch_.entries) return digits.Pick();
    team_.ForEach([&](unsigned thread) {
      if (thread == 0) state().too_few = 1;
    });
  }

  // (3) For each digit: how often it follows those that are known. The first is known after the
  // scan, unless there were too few candidates: then the other elements are counted as well.
  // A team takes every CounterTeams-th tile, and adds its counts to those of the others once.
  THINWIRE_HD void CountDigits(uint32_t first, unsigned digit) {
    if (digit == 0 && state().too_few == 0) return;
    EntryDigits<Team> digits = DigitsOf(digit);
    const uint32_t known = state().key, low = state().low, teams = CounterTeams(launch_.tiles);
    digits.Clear();
    team_.Sync();
    THINWIRE_ROLL
    for (uint32_t number = first; number < launch_.tiles; number += teams) {
      const EntrySource source(launch_, number);
      team_.ForEach([&](unsigned thread) {
        EntryItems items;
        Values u;
        source.Find(thread, items, u);
        THINWIRE_UNROLL
        for (unsigned k = 0; k < kQuads * kQuad; ++k) {
          const uint32_t key = SelectionKey(items.x.v[k]);
          const bool counts = digit == 0 ? key < low : DigitOf(digit).Before(key) == known;
          if ((items.there >> k & 1) != 0 && counts) digits.Count(thread, key);
        }
      });
    }
    team_.Sync();
    digits.Flush();
    if (IsLastTeam(team_, shared_.sums, &state().finished[digit], teams)) digits.Pick();
  }

  // (4) How many elements of each tile are sent; the last team knows of all how many come before.
  THINWIRE_HD void Count(uint32_t number) {
    const EntrySource source(launch_, number);
    const uint32_t last = state().key;
    PerThread<uint32_t> counts, all;
    team_.ForEach([&](unsigned thread) {
      EntryItems items;
      Values u;
      source.Find(thread, items, u);
      counts[thread] = 0;
      THINWIRE_UNROLL
      for (unsigned k = 0; k < kQuads * kQuad; ++k) counts[thread] += WeightOf(items, k, last);
    });
    ExclusiveSum(team_, shared_.sums, counts, all);
    team_.ForEach([&](unsigned thread) {
      if (thread != 0) return;
      source.note().above = all[thread] & kAboveMask;
      source.note().equal = all[thread] / kEqual;
    });
    if (!IsLastTeam(team_, shared_.sums, &state().finished[kCounted], launch_.tiles)) return;
    EntryOffsets<Team>(team_, shared_.sums, launch_).Run();
  }

  // (5) The entries, each at its place, and what they leave behind.
  THINWIRE_HD void Send(uint32_t number) {
    const EntrySource source(launch_, number);
    const uint32_t last = state().key;
    PerThread<EntryItems> items;
    PerThread<QuadCounts> ranks;
    PerThread<uint32_t> all;
    team_.ForEach([&](unsigned thread) {
      Values u;
      source.Find(thread, items[thread], u);
      if (source.anew()) StoreFinite(thread, source, items[thread], u);
      THINWIRE_UNROLL
      for (unsigned q = 0; q < kQuads; ++q) {
        ranks[thread].v[q] = 0;
        THINWIRE_UNROLL
        for (unsigned i = 0; i < kQuad; ++i) {
          ranks[thread].v[q] += WeightOf(items[thread], q * kQuad + i, last);
        }
      }
    });
    RankQuads(team_, shared_.quads, shared_.sums, ranks, all);
    team_.ForEach(
        [&](unsigned thread) { SendItems(thread, source, items[thread], ranks[thread]); });
  }

 private:
  // Elements above the k-th key and equal to it, in one number: a tile has 4096 at most.
  static constexpr uint32_t kEqual = 1u << 16, kAboveMask = kEqual - 1;

  THINWIRE_HD EntryState& state() const { return *launch_.room.state; }
  THINWIRE_HD EntryDigits<Team> DigitsOf(unsigned digit) {
    return EntryDigits<Team>(team_, shared_.digits, shared_.sums, launch_, digit);
  }

  // A bit for each candidate; notes what is not finite.
  THINWIRE_HD uint32_t Mark(unsigned thread, const EntryItems& items, EntryDigits<Team>& digits) {
    const uint32_t low = state().low;
    uint32_t hits = 0;
    bool finite = true;
    THINWIRE_UNROLL
    for (unsigned k = 0; k < kQuads * kQuad; ++k) {
      if ((items.there >> k & 1) == 0) continue;
      const uint32_t key = SelectionKey(items.x.v[k]);
      finite = finite && StoresResidual(items.x.v[k]);
      if (key < low) continue;
      hits |= 1u << k;
      digits.Count(thread, key);
    }
    if (!finite) shared_.not_finite.Add(team_, thread, 0, 1);
    return hits;
  }

  THINWIRE_HD static void CountMarks(uint32_t marks, QuadCounts& counts) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      counts.v[q] = 0;
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kQuad; ++i) counts.v[q] += marks >> (q * kQuad + i) & 1;
    }
  }

  // Notes where the tile's x will be, and takes its part of the list. One thread of a team. The
  // order in which tiles come here is no matter: each knows its own part.
  THINWIRE_HD uint32_t TakeRoom(const EntrySource& source, bool kept, uint32_t candidates) {
    Team::AtomicAdd(&state().found, candidates);
    uint32_t first = kept ? EntryTile::kKept : EntryTile::kAnew;
    if (kept && candidates <= kMaxListed) {
      const uint32_t taken = Team::AtomicAdd(&state().listed, candidates);
      if (taken + candidates <= launch_.room.capacity) first = taken;
    }
    source.note().first = first;
    source.note().count = candidates;
    return first;
  }

  THINWIRE_HD void List(unsigned thread, const EntryItems& items, uint32_t hits,
                        const QuadCounts& ranks, uint32_t first, size_t begin) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      uint32_t at = first + ranks.v[q];
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kQuad; ++i) {
        if ((hits >> (q * kQuad + i) & 1) == 0) continue;
        launch_.room.index[at] = static_cast<uint32_t>(begin + PlaceOf(thread, q) + i);
        launch_.room.bits[at++] = BitsOf(items.x.v[q * kQuad + i]);
      }
    }
  }

  // 1 if item k is surely sent, kEqual if it ties with `last`, the smallest key that is sent, or 0.
  THINWIRE_HD static uint32_t WeightOf(const EntryItems& items, unsigned k, uint32_t last) {
    if ((items.there >> k & 1) == 0) return 0;
    const uint32_t key = SelectionKey(items.x.v[k]);
    return key > last ? 1 : key == last ? kEqual : 0;
  }

  // Stores what the scan left undone in a tile that has elements that are not finite.
  THINWIRE_HD void StoreFinite(unsigned thread, const EntrySource& source, const EntryItems& items,
                               const Values& u) {
    if (launch_.residual.data == nullptr) return;
    THINWIRE_UNROLL
    for (unsigned k = 0; k < kQuads * kQuad; ++k) {
      if ((items.there >> k & 1) == 0 || !StoresResidual(items.x.v[k])) continue;
      const size_t at = source.tile().begin + PlaceOf(thread, k / kQuad) + k % kQuad;
      static_cast<float*>(launch_.residual.data)[at] = items.x.v[k];
      if (launch_.velocity.data == nullptr) continue;
      static_cast<float*>(launch_.velocity.data)[at] = u.v[k];
    }
  }

  // `ranks`: the tile's elements before each quad, as WeightOf counts them. Of those equal to the
  // k-th key the first `wanted` are sent.
  THINWIRE_HD void SendItems(unsigned thread, const EntrySource& source, const EntryItems& items,
                             const QuadCounts& ranks) {
    const uint32_t wanted = state().wanted, last = state().key;
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      uint32_t above = source.note().above + (ranks.v[q] & kAboveMask);
      uint32_t equal = source.note().equal + ranks.v[q] / kEqual;
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kQuad; ++i) {
        const unsigned k = q * kQuad + i;
        const uint32_t weight = WeightOf(items, k, last);
        if (weight == 1 || (weight == kEqual && equal < wanted)) {
          SendItem(source.IndexOf(thread, k), items.x.v[k],
                   above + (equal < wanted ? equal : wanted));
        }
        above += weight & kAboveMask;
        equal += weight / kEqual;
      }
    }
  }

  THINWIRE_HD void SendItem(size_t index, float x, uint32_t place) {
    const uint32_t entry = EntryOf(x, index);
    reinterpret_cast<uint32_t*>(launch_.wire.data + launch_.wire.codes_at)[place] = entry;
    if (launch_.residual.data == nullptr || !StoresResidual(x)) return;
    static_cast<float*>(launch_.residual.data)[index] = x - EntryValue(entry);
    if (launch_.velocity.data == nullptr || !launch_.masking) return;
    static_cast<float*>(launch_.velocity.data)[index] = 0.0f;
  }

  Team& team_;
  EntryShared<Team>& shared_;
  const EncodeEntriesLaunch& launch_;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_ENTRY_ENCODER_H_
