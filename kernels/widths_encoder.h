// WidthsEncoder: encodes the x of a tile, with the heads in the wire and the shard's plan, to
// codes, residual and decoded values.
#ifndef THINWIRE_KERNELS_WIDTHS_ENCODER_H_
#define THINWIRE_KERNELS_WIDTHS_ENCODER_H_

#include "kernels/elements.h"
#include "kernels/widths_decoder.h"

namespace thinwire::kernels {

template <typename Team>
class WidthsEncoder {
  template <typename T>
  using PerThread = typename Team::template PerThread<T>;

 public:
  THINWIRE_HD WidthsEncoder(Team& team, const Codec& codec, const Wire& wire, const TileRange& tile,
                            const WidthsPlan& plan)
      : team_(team), codec_(codec), wire_(wire), tile_(tile), plan_(plan) {}

  // x: zeros after the last element. Leaves the levels of the codes in y.
  THINWIRE_HD void Run(PerThread<Values>& x, PerThread<Values>& y) {
    FindParts(team_, codec_, wire_.data, tile_, plan_, parts_);
    team_.ForEach([&](unsigned thread) { ToWholes(thread, x[thread], y[thread]); });
    TeamButterflies(team_, y);  // of integers: any order gives the same sums
    PerThread<Nibbles> nibbles;
    team_.ForEach([&](unsigned thread) {
      THINWIRE_UNROLL
      for (unsigned p = 0; p < kParts; ++p) {
        FindCodes(parts_[thread].part[p].width, y[thread].v + p * kPartElements,
                  nibbles[thread].quad + p * kTransformQuads);
      }
    });
    StorePlanes(nibbles);
    ZeroRest();
  }

  // After Run: converts levels to values.
  THINWIRE_HD void Decode(PerThread<Values>& y) { ValuesOfLevels(team_, codec_, parts_, y); }

  // A block that is not finite leaves its residual unchanged.
  THINWIRE_HD void KeepResidual(PerThread<Values>& x, PerThread<Values>& decoded,
                                const Elements& residual) {
    team_.ForEach([&](unsigned thread) {
      THINWIRE_UNROLL
      for (unsigned q = 0; q < kQuads; ++q) {
        const BlockPart& part = parts_[thread].part[q / kTransformQuads];
        if (part.head >= kFirstNonFiniteHead) continue;
        float lost[kQuad];
        THINWIRE_UNROLL
        for (unsigned i = 0; i < kQuad; ++i) {
          lost[i] = x[thread].v[q * kQuad + i] - decoded[thread].v[q * kQuad + i];
        }
        StoreQuad<DType::kF32>(lost, tile_.Place(thread, q), tile_.numel, residual);
      }
    });
  }

 private:
  THINWIRE_HD void ToWholes(unsigned thread, const Values& x, Values& y) {
    THINWIRE_UNROLL
    for (unsigned p = 0; p < kParts; ++p) {
      const BlockPart& part = parts_[thread].part[p];
      const float inverse = part.width == 0 ? 0.0f : AdaptiveInverse(FromBf16(part.head));
      THINWIRE_UNROLL
      for (unsigned k = p * kPartElements; k < (p + 1) * kPartElements; ++k) {
        const unsigned place = PlaceOf(thread, k / kQuad) + k % kQuad;
        y.v[k] = rintf(x.v[k] * (SignOf(codec_, place) * inverse));
      }
    }
  }

  THINWIRE_HD void StorePlanes(PerThread<Nibbles>& nibbles) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      PerThread<uint32_t> word;
      team_.ForEach([&](unsigned thread) { word[thread] = nibbles[thread].quad[q]; });
      TransposeNibbles(team_, word);
      team_.ForEach([&](unsigned thread) {
        const BlockPart& part = parts_[thread].part[q / kTransformQuads];
        if (!HasPlane(part, thread)) return;
        const size_t at = wire_.codes_at + PlaneWordAt(part, thread, q);
        CopyWord<sizeof(uint32_t)>(wire_.data + at, &word[thread]);
      });
    }
  }

  // Zeroes the unused part of the budget: each tile handles what lies in its share.
  THINWIRE_HD void ZeroRest() {
    const size_t tile = tile_.begin / kTile, tiles = (tile_.numel + kTile - 1) / kTile;
    const size_t budget = AdaptivePlanes(codec_.sixteenths, BlocksOf(tile_.numel));
    const size_t share = tile * budget / tiles, end = (tile + 1) * budget / tiles;
    const size_t begin = share < plan_.planes ? plan_.planes : share;
    team_.ForEach([&](unsigned thread) {
      constexpr unsigned kAtOnce = 16, kStores = kPlaneBytes / kAtOnce;
      alignas(kAtOnce) const uint8_t zeros[kAtOnce] = {};
      for (size_t i = begin * kStores + thread; i < end * kStores; i += kThreads) {
        CopyWord<kAtOnce>(wire_.data + wire_.codes_at + i * kAtOnce, zeros);
      }
    });
  }

  Team& team_;
  const Codec& codec_;
  const Wire wire_;
  const TileRange tile_;
  const WidthsPlan& plan_;
  PerThread<BlockParts> parts_;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_WIDTHS_ENCODER_H_
