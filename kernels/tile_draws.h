// TileDraws: the draws of stochastic rounding of a tile. Sixteen elements share a call of the
// generator (compress/philox.h), and they are sixteen threads'. So the threads make the calls of a
// tile, one each, and find the draws of their own elements in shared memory.
#ifndef THINWIRE_KERNELS_TILE_DRAWS_H_
#define THINWIRE_KERNELS_TILE_DRAWS_H_

#include <cmath>

#include "compress/philox.h"
#include "kernels/tile.h"

namespace thinwire::kernels {

inline constexpr unsigned kDrawWords = 4;  // of a call, of which each is four draws
inline constexpr unsigned kCallsOfTile = kTile / kDrawGroup * kDrawLanes;
static_assert(kDrawLanes % kQuad == 0 && kDrawGroup % kGroup == 0 && kMinBlock % kGroup == 0,
              "the elements of a quad have the same draw of neighbouring calls");

// By group, word and lane. A tensor's first element may lie within a group: one more of them then.
template <typename Team, bool kWanted>
using SharedDraws =
    typename Team::template Shared<uint32_t,
                                   kWanted ? (kCallsOfTile + kDrawLanes) * kDrawWords : 1>;

// DrawOf of philox.h in its two steps: the call with a counter, and a draw of one of its words.
THINWIRE_HD Philox4 CallAt(const Draws& draws, uint64_t counter) {
  return Philox({{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                  static_cast<uint32_t>(draws.stream), static_cast<uint32_t>(draws.stream >> 32)}},
                draws.key);
}
THINWIRE_HD uint16_t WindowOf(uint64_t word, unsigned draw) {
  return static_cast<uint16_t>((word << 32 | word) >> (draw % 4 * 8));
}

template <typename Team, typename Shared>
class TileDraws {
 public:
  THINWIRE_HD TileDraws(Team& team, Shared& words, const Draws& draws, size_t tile_begin)
      : team_(team), words_(words), draws_(draws), tile_begin_(tile_begin) {}

  // Others may be asked for their draws after a Sync.
  THINWIRE_HD void Make() {
    const Draws now = DrawsNow(draws_);
    const uint64_t first = (now.first + tile_begin_) / kDrawGroup * kDrawLanes;
    const unsigned calls = kCallsOfTile + (begin_in_group() > 0 ? kDrawLanes : 0);
    team_.ForEach([&](unsigned thread) {
      for (unsigned call = thread; call < calls; call += kThreads) {
        const Philox4 random = CallAt(now, first + call);
        const unsigned at = call / kDrawLanes * kDrawLanes * kDrawWords + call % kDrawLanes;
        THINWIRE_UNROLL
        for (unsigned w = 0; w < kDrawWords; ++w) {
          words_.Put(team_, thread, at + w * kDrawLanes, random.word[w]);
        }
      }
    });
  }

  // The numbers in (0, 1) of a thread's quad, as UniformOf(DrawOf()) gives them.
  THINWIRE_HD void Get(unsigned thread, unsigned quad, float* uniform) const {
    const unsigned e = begin_in_group() + PlaceOf(thread, quad);
    const unsigned draw = e % kDrawGroup / kDrawLanes;
    const unsigned row = e / kDrawGroup * kDrawWords + draw / kDrawWords;
    const unsigned at = (row * (kDrawLanes / kQuad) + e % kDrawLanes / kQuad) * kQuad;
    uint32_t words[kQuad];
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) words[i] = words_.Get(team_, thread, at + i);
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) uniform[i] = UniformOf(WindowOf(words[i], draw));
  }

 private:
  THINWIRE_HD unsigned begin_in_group() const {
    return static_cast<unsigned>((draws_.first + tile_begin_) % kDrawGroup);
  }

  Team& team_;
  Shared& words_;
  const Draws& draws_;
  const size_t tile_begin_;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_TILE_DRAWS_H_
