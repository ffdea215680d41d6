// EntrySource: the x of a tile in topk's encoding, computed again or read back.
#ifndef THINWIRE_KERNELS_ENTRY_SOURCE_H_
#define THINWIRE_KERNELS_ENTRY_SOURCE_H_

#include "compress/codecs/topk.h"
#include "kernels/elements.h"
#include "kernels/entry_jobs.h"
#include "kernels/exact_sums.h"

namespace thinwire::kernels {

// A thread's part of a tile: elements by place, or candidates.
struct EntryItems {
  Values x;
  uint32_t there = 0;  // bit k: x.v[k] is valid
};

class EntrySource {
 public:
  THINWIRE_HD EntrySource(const EncodeEntriesLaunch& launch, uint32_t tile)
      : launch_(launch), number_(tile), tile_{size_t{tile} * kTile, launch.numel} {}

  THINWIRE_HD const TileRange& tile() const { return tile_; }
  THINWIRE_HD EntryTile& note() const { return launch_.room.tiles[number_]; }

  // True if the scan stored nothing of the tile.
  THINWIRE_HD bool anew() const { return note().first == EntryTile::kAnew; }

  // Computes x from the gradient, the residual and the momentum, which becomes u.
  THINWIRE_HD void Make(unsigned thread, EntryItems& items, Values& u) const {
    LoadValuesOf(launch_.dtype, launch_.gradient, tile_, thread, items.x);
    if (launch_.velocity.data != nullptr) {
      LoadValues<DType::kF32>(launch_.velocity, tile_, thread, u);
      THINWIRE_UNROLL
      for (unsigned k = 0; k < kQuads * kQuad; ++k) {
        const float g = items.x.v[k];
        u.v[k] = Add(Mul(launch_.momentum, u.v[k]), g);
        items.x.v[k] = launch_.nesterov ? Add(g, Mul(launch_.momentum, u.v[k])) : u.v[k];
      }
    }
    if (launch_.residual.data != nullptr) {
      Values r;
      LoadValues<DType::kF32>(launch_.residual, tile_, thread, r);
      AddValues(r, items.x);
      items.x = r;
    }
    items.there = ThereBelow(thread, tile_.end() - tile_.begin);
  }

  // After the scan: the tile's candidates, if they are listed and enough were found, or all its
  // elements.
  THINWIRE_HD void Find(unsigned thread, EntryItems& items, Values& u) const {
    if (anew()) return Make(thread, items, u);
    if (!listed()) {
      LoadValues<DType::kF32>(launch_.residual, tile_, thread, items.x);
      items.there = ThereBelow(thread, tile_.end() - tile_.begin);
      return;
    }
    const EntryTile& at = note();
    items.there = ThereBelow(thread, at.count);
    THINWIRE_UNROLL
    for (unsigned k = 0; k < kQuads * kQuad; ++k) {
      const uint32_t candidate = at.first + PlaceOf(thread, k / kQuad) + k % kQuad;
      if (items.there >> k & 1) items.x.v[k] = FloatOf(launch_.room.bits[candidate]);
    }
  }

  // The element of item k of a thread, after Find.
  THINWIRE_HD size_t IndexOf(unsigned thread, unsigned k) const {
    const unsigned place = PlaceOf(thread, k / kQuad) + k % kQuad;
    return listed() ? launch_.room.index[note().first + place] : tile_.begin + place;
  }

 private:
  THINWIRE_HD bool listed() const {
    return note().first < EntryTile::kAnew && launch_.room.state->found >= launch_.entries;
  }
  THINWIRE_HD static uint32_t ThereBelow(unsigned thread, size_t count) {
    uint32_t there = 0;
    THINWIRE_UNROLL
    for (unsigned k = 0; k < kQuads * kQuad; ++k) {
      there |= static_cast<uint32_t>(PlaceOf(thread, k / kQuad) + k % kQuad < count) << k;
    }
    return there;
  }

  const EncodeEntriesLaunch& launch_;
  const uint32_t number_;
  const TileRange tile_;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_ENTRY_SOURCE_H_
