// Reductions as several launches, if no single kernel does everything: values of codecs of widths
// are first decoded to fp32; and if the result's codec is one of widths, or differs from the ranks'
// wires, it is encoded from the fp32 mean, and decoded again. That is more traffic, but no kernel
// needs the registers of two codecs, and no kernel is compiled for each pair.
#ifndef THINWIRE_KERNELS_REDUCE_PARTS_H_
#define THINWIRE_KERNELS_REDUCE_PARTS_H_

#include "compress/codecs/fp32.h"
#include "kernels/widths.h"

namespace thinwire::kernels {

// Shards of fp32 between the launches are aligned to this many elements.
inline constexpr size_t kFloatsApart = 64;
inline size_t FloatsOf(const ReduceLaunch& launch) {
  return (launch.numel + kFloatsApart - 1) / kFloatsApart * kFloatsApart;
}

inline Codec Fp32() {
  Codec codec{};
  codec.id = codecs::Fp32::kTraits.id;
  return codec;
}

inline bool AreEqual(const Codec& a, const Codec& b) {
  return a.id == b.id && a.hadamard == b.hadamard;
}

// True if the result is encoded from the mean in memory: no sum kernel has its codec.
inline bool EncodesMean(const ReduceLaunch& launch) {
  const Codec up = HasWidths(launch.up) ? Fp32() : launch.up;
  return HasWidths(launch.down) || !(AreEqual(up, launch.down) || AreEqual(Fp32(), launch.down));
}

inline bool IsInParts(const ReduceLaunch& launch) {
  return HasWidths(launch.up) || EncodesMean(launch);
}

// Arrays of floats between the launches: the wires' values, the mean, and the bytes of a result
// that the caller does not need but that must be decoded.
inline size_t FloatsBetween(const ReduceLaunch& launch) {
  size_t arrays = HasWidths(launch.up) ? launch.ranks : 0;
  if (EncodesMean(launch)) arrays += launch.wire_out.data == nullptr ? 2 : 1;
  return arrays * FloatsOf(launch);
}

// The floats, followed by the plans of one part.
inline size_t RoomOf(const ReduceLaunch& launch) {
  if (!IsInParts(launch)) return 0;
  return FloatsBetween(launch) * sizeof(float) + kMaxJobs * sizeof(WidthsPlan);
}

inline Elements FloatsAt(float* data) { return {data, true}; }

// The work before and after the sum. The launch's tiles must have full size.
class ReduceParts {
 public:
  ReduceParts(const ReduceLaunch& launch, uint8_t* room)
      : sum_(launch),
        floats_(reinterpret_cast<float*>(room)),
        plans_(room + FloatsBetween(launch) * sizeof(float)) {}

  // Calls decode(DecodeLaunch) until all wires are in memory as fp32 wires.
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

  // Makes the sum write fp32 to memory, and returns the launches that encode that and decode it
  // again.
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
    result.encode.jobs.threads = sum_.threads;
    result.encode.jobs.count = 1;
    float* const mean = Take();
    if (sum_.wire_out.data == nullptr) sum_.wire_out.data = reinterpret_cast<uint8_t*>(Take());
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
    launch.jobs.threads = sum_.threads;
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
  uint8_t* const plans_;  // used by one part after the other
};

// Calls run(...) for each launch in turn. `room`: RoomOf(launch) bytes.
template <typename Run>
void ReduceInParts(const ReduceLaunch& launch, uint8_t* room, Run&& run) {
  ReduceParts parts(launch, room);
  if (HasWidths(launch.up)) parts.DecodeWires(run);
  if (!EncodesMean(launch)) return run(parts.sum());
  const ReduceParts::Result result = parts.TakeResult();
  run(parts.sum());
  run(result.encode);
  run(result.decode);
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_REDUCE_PARTS_H_
