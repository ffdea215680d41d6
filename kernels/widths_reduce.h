// A reduction with a codec of widths, as launches of other kinds: values of such wires are decoded
// to fp32 first, and a result is encoded from the fp32 mean. A kernel that did all at once would
// need two codecs' registers; these codecs are for links that are slower than memory by far.
#ifndef THINWIRE_KERNELS_WIDTHS_REDUCE_H_
#define THINWIRE_KERNELS_WIDTHS_REDUCE_H_

#include "compress/codecs/fp32.h"
#include "kernels/widths.h"

namespace thinwire::kernels {

// Shards of fp32 between the launches lie on borders of this many elements.
inline constexpr size_t kFloatsApart = 64;
inline size_t FloatsOf(const ReduceLaunch& launch) {
  return (launch.numel + kFloatsApart - 1) / kFloatsApart * kFloatsApart;
}

// Floats between the launches.
inline size_t FloatsBetween(const ReduceLaunch& launch) {
  const size_t wires = HasWidths(launch.up) ? launch.ranks : 0;
  return (wires + (HasWidths(launch.down) ? 1 : 0)) * FloatsOf(launch);
}

// The floats, and the plans of one part behind them.
inline size_t RoomOf(const ReduceLaunch& launch) {
  if (!HasWidths(launch.up) && !HasWidths(launch.down)) return 0;
  return FloatsBetween(launch) * sizeof(float) + kMaxJobs * sizeof(WidthsPlan);
}

inline Codec Fp32() {
  Codec codec{};
  codec.id = codecs::Fp32::kTraits.id;
  return codec;
}
inline Elements FloatsAt(float* data) { return {data, true}; }

// The work before the sum, and after it.
class ReduceParts {
 public:
  ReduceParts(const ReduceLaunch& launch, uint8_t* room)
      : sum_(launch),
        floats_(reinterpret_cast<float*>(room)),
        plans_(room + FloatsBetween(launch) * sizeof(float)) {}

  // Calls decode(DecodeLaunch) until all wires lie in memory as those of fp32.
  template <typename Decode>
  void DecodeWires(Decode& decode) {
    DecodeLaunch wires = NewDecode(sum_.up, DType::kF32);
    for (uint32_t rank = 0; rank < sum_.ranks; ++rank) {
      const uint8_t*& wire = sum_.wires[rank];
      if (wire == nullptr) continue;
      if (wires.jobs.count == kMaxJobs) {
        decode(wires);
        wires = NewDecode(sum_.up, DType::kF32);
      }
      float* const values = Take();
      AddDecode({const_cast<uint8_t*>(wire), sum_.up_codes_at, 0}, FloatsAt(values), &wires);
      wire = reinterpret_cast<const uint8_t*>(values);
    }
    sum_.up_codes_at = 0;
    if (wires.jobs.count > 0) decode(wires);
    sum_.up = Fp32();
  }

  // Makes the sum one to fp32, in memory, and returns what encodes that, and decodes it again.
  struct Result {
    EncodeLaunch encode;
    DecodeLaunch decode;
  };
  Result TakeResult() {
    Result result{.encode = {}, .decode = NewDecode(sum_.down, sum_.dtype)};
    result.encode.codec = sum_.down;
    result.encode.dtype = DType::kF32;
    result.encode.room = plans_;
    result.encode.jobs.tiles = sum_.tiles;
    result.encode.jobs.count = 1;
    float* const mean = Take();
    result.encode.jobs.job[0] = {.gradient = FloatsAt(mean),
                                 .velocity = {},
                                 .residual = sum_.residual,
                                 .wire = sum_.wire_out,
                                 .numel = sum_.numel,
                                 .beta = 0.0f,
                                 .first_tile = 0};
    AddDecode(sum_.wire_out, sum_.out, &result.decode);
    sum_.wire_out = {reinterpret_cast<uint8_t*>(mean), 0, FloatsOf(sum_) * sizeof(float)};
    sum_.residual.data = nullptr;
    sum_.down = Fp32();
    return result;
  }

  const ReduceLaunch& sum() const { return sum_; }

 private:
  DecodeLaunch NewDecode(const Codec& codec, DType dtype) const {
    DecodeLaunch launch{};
    launch.codec = codec;
    launch.dtype = dtype;
    launch.room = plans_;
    return launch;
  }
  void AddDecode(const Wire& wire, const Elements& out, DecodeLaunch* launch) const {
    launch->jobs.job[launch->jobs.count++] = {
        .wire = wire, .out = out, .numel = sum_.numel, .first_tile = launch->jobs.tiles};
    launch->jobs.tiles += sum_.tiles;
  }
  float* Take() {
    float* const taken = floats_;
    floats_ += FloatsOf(sum_);
    return taken;
  }

  ReduceLaunch sum_;
  float* floats_;
  uint8_t* const plans_;  // of one part after the other
};

// Calls run(...) for one launch after the other. `room`: RoomOf(launch) bytes.
template <typename Run>
void ReduceInParts(const ReduceLaunch& launch, uint8_t* room, Run&& run) {
  ReduceParts parts(launch, room);
  if (HasWidths(launch.up)) parts.DecodeWires(run);
  if (!HasWidths(launch.down)) return run(parts.sum());
  const ReduceParts::Result result = parts.TakeResult();
  run(parts.sum());
  run(result.encode);
  run(result.decode);
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_WIDTHS_REDUCE_H_
