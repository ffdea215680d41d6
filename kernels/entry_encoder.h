// EntryEncoder: encodes the exact k largest elements as topk's wire bytes; the kernels in the order
// in which they run.
//
// The scan is the only pass over the data: it adds gradient, momentum and residual, stores them,
// and lists the elements that reach the threshold from the last step. While that holds, the other
// kernels read only the list, which has little more than k candidates. Otherwise (in the first
// step, after a sudden change) they go tile by tile, and read the residual of tiles that are not in
// the list: the result is the same. The host never needs to know, so everything can be captured in
// a graph.
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
  typename Team::template Shared<uint32_t, 1> not_finite;
  typename Team::template Shared<uint32_t, 1> first;
};

template <typename Team>
class EntryEncoder {
  template <typename T>
  using PerThread = typename Team::template PerThread<T>;
  static constexpr unsigned kCounted = kDigits;  // index in `finished`, after the digits
  static constexpr unsigned kAhead = 4;          // candidates that a thread loads at once

 public:
  THINWIRE_HD EntryEncoder(Team& team, EntryShared<Team>& shared, const EncodeEntriesLaunch& launch)
      : team_(team), shared_(shared), launch_(launch) {}

  // (1) By one team: resets the state.
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

  // (2) Stores x in the residual and lists the candidates.
  THINWIRE_HD void Scan(uint32_t number) {
    const EntrySource source(launch_, number);
    PerThread<EntryItems> items;
    PerThread<Values> u;
    PerThread<QuadCounts> ranks;
    PerThread<uint32_t> hits, all, taken;
    team_.ForEach([&](unsigned thread) {
      if (thread == 0) shared_.not_finite.Put(team_, thread, 0, 0);
    });
    team_.Sync();
    team_.ForEach([&](unsigned thread) {
      source.Make(thread, items[thread], u[thread]);
      hits[thread] = Mark(thread, items[thread]);
    });
    RankMarks(team_, shared_.sums, hits, ranks, all);
    bool kept = false;
    team_.ForEach([&](unsigned thread) {
      kept = launch_.residual.data != nullptr && shared_.not_finite.Get(team_, thread, 0) == 0;
      if (thread == 0) taken[thread] = Team::AtomicAdd(&state().found, all[thread]);
    });
    // The atomic's result arrives while x is stored.
    team_.ForEach([&](unsigned thread) {
      if (!kept) return;
      StoreValues<DType::kF32>(items[thread].x, source.tile(), thread, launch_.residual);
      if (launch_.velocity.data == nullptr) return;
      StoreValues<DType::kF32>(u[thread], source.tile(), thread, launch_.velocity);
    });
    team_.ForEach([&](unsigned thread) {
      if (thread != 0) return;
      shared_.first.Put(team_, thread, 0, Note(source, kept, taken[thread], all[thread]));
    });
    team_.Sync();
    team_.ForEach([&](unsigned thread) {
      const uint32_t first = shared_.first.Get(team_, thread, 0);
      if (first >= EntryTile::kAnew) return;
      List(thread, items[thread], hits[thread], ranks[thread], first, source.tile().begin);
    });
  }

  // (3) For each digit: counts how often it follows the known digits. A team handles a part of the
  // list, or every EntryTeams-th tile, and adds its counts to the others' once.
  THINWIRE_HD void CountDigits(uint32_t first, unsigned digit) {
    EntryDigits<Team> digits(team_, shared_.digits, shared_.sums, launch_, digit);
    const uint32_t teams = EntryTeams(launch_.tiles), known = state().key;
    const Digit at = DigitOf(digit);
    digits.Clear();
    team_.Sync();
    if (in_list()) {
      team_.ForEach([&](unsigned thread) { CountListed(thread, first, teams, at, known, digits); });
    } else {
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
            if ((items.there >> k & 1) != 0 && at.Before(key) == known) digits.Count(thread, key);
          }
        });
      }
    }
    team_.Sync();
    digits.Flush();
    if (IsLastTeam(team_, shared_.sums, &state().finished[digit], teams)) digits.Pick();
  }

  // (4) Counts the elements of each tile of a group that are sent; the last team computes for all
  // groups how many come before them.
  THINWIRE_HD void Count(uint32_t group) {
    PerThread<uint32_t> sent;
    if (in_list()) {
      CountGroupInList(group, sent);
    } else {
      CountGroup(group, sent);
    }
    team_.ForEach([&](unsigned thread) {
      if (thread != 0) return;
      launch_.room.groups[group] = {sent[thread] & kAboveMask, sent[thread] / kEqual};
    });
    const uint32_t groups = GroupsOf(launch_.tiles);
    if (!IsLastTeam(team_, shared_.sums, &state().finished[kCounted], groups)) return;
    EntryOffsets<Team>(team_, shared_.sums, launch_).Run();
  }

  // (5) Writes the entries to their positions, and stores what sending leaves. A team handles every
  // EntryTeams-th group, or tile.
  THINWIRE_HD void Send(uint32_t first) {
    const uint32_t teams = EntryTeams(launch_.tiles), groups = GroupsOf(launch_.tiles);
    if (in_list()) {
      THINWIRE_ROLL
      for (uint32_t group = first; group < groups; group += teams) SendGroupInList(group);
    } else {
      THINWIRE_ROLL
      for (uint32_t number = first; number < launch_.tiles; number += teams) SendTile(number);
    }
  }

 private:
  // Elements above the k-th key and equal to it, in one number: a group has at most 32768.
  static constexpr uint32_t kEqual = 1u << 16, kAboveMask = kEqual - 1;
  static_assert(kGroupTiles * kTile < kEqual);

  THINWIRE_HD EntryState& state() const { return *launch_.room.state; }
  // The list has all candidates, and at least k.
  THINWIRE_HD bool in_list() const {
    return state().unlisted == 0 && state().found >= launch_.entries;
  }
  THINWIRE_HD uint32_t EndOf(uint32_t group) const {
    const uint32_t end = (group + 1) * kGroupTiles;
    return end < launch_.tiles ? end : launch_.tiles;
  }

  // A bit for each candidate; also records whether an element is not finite.
  THINWIRE_HD uint32_t Mark(unsigned thread, const EntryItems& items) {
    const uint32_t low = state().low;
    uint32_t hits = 0;
    bool finite = true;
    THINWIRE_UNROLL
    for (unsigned k = 0; k < kQuads * kQuad; ++k) {
      const bool there = (items.there >> k & 1) != 0;
      finite = finite && (!there || StoresResidual(items.x.v[k]));
      hits |= static_cast<uint32_t>(there && SelectionKey(items.x.v[k]) >= low) << k;
    }
    if (!finite) shared_.not_finite.Add(team_, thread, 0, 1);
    return hits;
  }

  // Records where the tile's x is; returns where its part of the list begins, which is `taken` if
  // there is room for it. Called by one thread per team. The order in which tiles get here does not
  // matter: each records its own part.
  THINWIRE_HD uint32_t Note(const EntrySource& source, bool kept, uint32_t taken,
                            uint32_t candidates) {
    const bool fits = taken + candidates <= launch_.room.capacity;
    const uint32_t first = !kept ? EntryTile::kAnew : fits ? taken : EntryTile::kKept;
    source.note().first = first;
    source.note().count = candidates;
    if (first >= EntryTile::kAnew) Team::AtomicAdd(&state().unlisted, 1);
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

  THINWIRE_HD void CountListed(unsigned thread, uint32_t team, uint32_t teams, const Digit& digit,
                               uint32_t known, EntryDigits<Team>& digits) {
    constexpr uint32_t kNone = ~0u;  // a key has 31 bits
    const uint32_t all = state().found, stride = teams * kThreads;
    for (uint32_t begin = team * kThreads + thread; begin < all; begin += kAhead * stride) {
      uint32_t key[kAhead];
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kAhead; ++i) {
        const uint32_t at = begin + i * stride;
        key[i] = at < all ? SelectionKey(FloatOf(launch_.room.bits[at])) : kNone;
      }
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kAhead; ++i) {
        if (key[i] != kNone && digit.Before(key[i]) == known) digits.Count(thread, key[i]);
      }
    }
  }

  // 1 for an element that is certainly sent, kEqual for one that ties with `last`, the smallest key
  // that is sent, or 0.
  THINWIRE_HD static uint32_t WeightOf(float x, uint32_t last) {
    const uint32_t key = SelectionKey(x);
    return key > last ? 1 : key == last ? kEqual : 0;
  }

  THINWIRE_HD void PutBefore(uint32_t tile, uint32_t weights) {
    launch_.room.tiles[tile].above = weights & kAboveMask;
    launch_.room.tiles[tile].equal = weights / kEqual;
  }

  // Each warp handles one tile. `all`: the weights of the group.
  THINWIRE_HD void CountGroupInList(uint32_t group, PerThread<uint32_t>& all) {
    const uint32_t last = state().key, end = EndOf(group);
    PerThread<uint32_t> weights;
    team_.ForEach([&](unsigned thread) {
      const uint32_t number = group * kGroupTiles + thread / kWarp;
      weights[thread] = 0;
      if (number >= end) return;
      const EntryTile note = launch_.room.tiles[number];
      for (uint32_t c = thread % kWarp; c < note.count; c += kWarp) {
        weights[thread] += WeightOf(FloatOf(launch_.room.bits[note.first + c]), last);
      }
    });
    ExclusiveSum(team_, shared_.sums, weights, all);
    team_.ForEach([&](unsigned thread) {
      const uint32_t number = group * kGroupTiles + thread / kWarp;
      if (thread % kWarp == 0 && number < end) PutBefore(number, weights[thread]);
    });
  }

  THINWIRE_HD void CountGroup(uint32_t group, PerThread<uint32_t>& all) {
    const uint32_t last = state().key, end = EndOf(group);
    PerThread<uint32_t> weights, tile;
    team_.ForEach([&](unsigned thread) { all[thread] = 0; });
    THINWIRE_ROLL
    for (uint32_t number = group * kGroupTiles; number < end; ++number) {
      const EntrySource source(launch_, number);
      team_.ForEach([&](unsigned thread) {
        EntryItems items;
        Values u;
        source.Find(thread, items, u);
        weights[thread] = 0;
        THINWIRE_UNROLL
        for (unsigned k = 0; k < kQuads * kQuad; ++k) {
          if (items.there >> k & 1) weights[thread] += WeightOf(items.x.v[k], last);
        }
      });
      ExclusiveSum(team_, shared_.sums, weights, tile);
      team_.ForEach([&](unsigned thread) {
        if (thread == 0) PutBefore(number, all[thread]);
        all[thread] += tile[thread];
      });
    }
  }

  // Stores what the scan did not store of a tile with elements that are not finite.
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

  // The numbers of elements with a key above the k-th, and with an equal one, before an element
  // that may be sent.
  struct Before {
    uint32_t above, equal;
  };

  // Counts over all tiles before this one.
  THINWIRE_HD Before BeforeTile(uint32_t number) const {
    const EntryTile& tile = launch_.room.tiles[number];
    const EntryGroup& group = launch_.room.groups[number / kGroupTiles];
    return {group.above + tile.above, group.equal + tile.equal};
  }

  // The sum of the weights of a quad's elements whose bit in `there` is set.
  THINWIRE_HD static uint32_t WeightsOf(const float* x, uint32_t there, uint32_t last) {
    uint32_t weights = 0;
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) {
      if (there >> i & 1) weights += WeightOf(x[i], last);
    }
    return weights;
  }

  // Sends the elements of a quad that are due. Of the elements equal to the k-th key the first
  // `wanted` are sent. index(i): element i's index in the shard.
  template <typename Index>
  THINWIRE_HD void SendQuad(const float* x, uint32_t there, Before before, Index index) {
    const uint32_t wanted = state().wanted, last = state().key;
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) {
      const uint32_t weight = (there >> i & 1) != 0 ? WeightOf(x[i], last) : 0;
      if (weight == 1 || (weight == kEqual && before.equal < wanted)) {
        SendItem(index(i), x[i], before.above + (before.equal < wanted ? before.equal : wanted));
      }
      before.above += weight & kAboveMask;
      before.equal += weight / kEqual;
    }
  }

  // Each warp handles one tile, one quad of candidates per lane at a time.
  THINWIRE_HD void SendGroupInList(uint32_t group) {
    constexpr uint32_t kRound = kWarp * kQuad;
    const uint32_t first = group * kGroupTiles, end = EndOf(group), last = state().key;
    uint32_t most = 0;
    for (uint32_t number = first; number < end; ++number) {
      const uint32_t count = launch_.room.tiles[number].count;
      most = count > most ? count : most;
    }
    PerThread<Before> before;
    team_.ForEach([&](unsigned thread) {
      const uint32_t number = first + thread / kWarp;
      before[thread] = number < end ? BeforeTile(number) : Before{0, 0};
    });
    THINWIRE_ROLL
    for (uint32_t begin = 0; begin < most; begin += kRound) {
      PerThread<Quad> quad;
      PerThread<uint32_t> weights, warp;
      team_.ForEach([&](unsigned thread) {
        const uint32_t number = first + thread / kWarp;
        quad[thread] = FindQuad(number, number < end, begin + thread % kWarp * kQuad);
        weights[thread] = WeightsOf(quad[thread].x, quad[thread].there, last);
      });
      WarpExclusiveSum(team_, weights, warp);
      team_.ForEach([&](unsigned thread) {
        const Quad& own = quad[thread];
        const uint32_t lanes = weights[thread];
        SendQuad(
            own.x, own.there,
            {before[thread].above + (lanes & kAboveMask), before[thread].equal + lanes / kEqual},
            [&](unsigned i) { return launch_.room.index[own.first + i]; });
        before[thread].above += warp[thread] & kAboveMask;
        before[thread].equal += warp[thread] / kEqual;
      });
    }
  }

  // Candidates of a tile, from list entry `first` on.
  struct Quad {
    float x[kQuad];
    uint32_t first, there;
  };

  THINWIRE_HD Quad FindQuad(uint32_t number, bool any, uint32_t place) const {
    Quad quad = {};
    if (!any) return quad;
    const EntryTile note = launch_.room.tiles[number];
    quad.first = note.first + place;
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) {
      if (place + i >= note.count) continue;
      quad.x[i] = FloatOf(launch_.room.bits[quad.first + i]);
      quad.there |= 1u << i;
    }
    return quad;
  }

  THINWIRE_HD void SendTile(uint32_t number) {
    const EntrySource source(launch_, number);
    const uint32_t last = state().key;
    PerThread<EntryItems> items;
    PerThread<QuadCounts> above, equal;  // elements before each quad
    PerThread<uint32_t> larger, ties, all;
    team_.ForEach([&](unsigned thread) {
      Values u;
      source.Find(thread, items[thread], u);
      if (source.anew()) StoreFinite(thread, source, items[thread], u);
      larger[thread] = ties[thread] = 0;
      THINWIRE_UNROLL
      for (unsigned k = 0; k < kQuads * kQuad; ++k) {
        const bool there = (items[thread].there >> k & 1) != 0;
        const uint32_t weight = there ? WeightOf(items[thread].x.v[k], last) : 0;
        larger[thread] |= (weight & kAboveMask) << k;
        ties[thread] |= weight / kEqual << k;
      }
    });
    RankMarks(team_, shared_.sums, larger, above, all);
    RankMarks(team_, shared_.sums, ties, equal, all);
    team_.ForEach([&](unsigned thread) {
      const Before before = BeforeTile(number);
      THINWIRE_UNROLL
      for (unsigned q = 0; q < kQuads; ++q) {
        SendQuad(items[thread].x.v + q * kQuad, items[thread].there >> q * kQuad,
                 {before.above + above[thread].v[q], before.equal + equal[thread].v[q]},
                 [&](unsigned i) { return source.IndexOf(thread, q * kQuad + i); });
      }
    });
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
