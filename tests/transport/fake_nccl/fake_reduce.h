// Reductions of the fake NCCL: elements of all ranks are added in rank order.
#ifndef THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_REDUCE_H_
#define THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_REDUCE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "compress/element_math.h"

namespace thinwire {

// NCCL's numbers.
enum FakeType : int {
  kFakeInt8 = 0,
  kFakeUint8,
  kFakeInt32,
  kFakeUint32,
  kFakeInt64,
  kFakeUint64,
  kFakeF16,
  kFakeF32,
  kFakeF64,
  kFakeBf16,
};
enum FakeOp : int { kFakeSum = 0, kFakeProd, kFakeMax, kFakeMin, kFakeAvg };

// Returns bytes per element; 0: unknown type.
inline size_t FakeSizeOf(int type) {
  constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return type >= 0 && type <= kFakeBf16 ? kSizes[type] : 0;
}

template <typename T>
T FakeLoad(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

inline double FakeRead(const uint8_t* from, int type) {
  switch (type) {
    case kFakeInt8: return FakeLoad<int8_t>(from);
    case kFakeUint8: return FakeLoad<uint8_t>(from);
    case kFakeInt32: return FakeLoad<int32_t>(from);
    case kFakeUint32: return FakeLoad<uint32_t>(from);
    case kFakeInt64: return static_cast<double>(FakeLoad<int64_t>(from));
    case kFakeUint64: return static_cast<double>(FakeLoad<uint64_t>(from));
    case kFakeF16: return FromF16(FakeLoad<uint16_t>(from));
    case kFakeBf16: return FromBf16(FakeLoad<uint16_t>(from));
    case kFakeF32: return FakeLoad<float>(from);
    default: return FakeLoad<double>(from);
  }
}

template <typename T>
void FakeStore(T value, uint8_t* to) {
  std::memcpy(to, &value, sizeof(T));
}

inline void FakeWrite(double value, uint8_t* to, int type) {
  switch (type) {
    case kFakeInt8: return FakeStore(static_cast<int8_t>(value), to);
    case kFakeUint8: return FakeStore(static_cast<uint8_t>(value), to);
    case kFakeInt32: return FakeStore(static_cast<int32_t>(value), to);
    case kFakeUint32: return FakeStore(static_cast<uint32_t>(value), to);
    case kFakeInt64: return FakeStore(static_cast<int64_t>(value), to);
    case kFakeUint64: return FakeStore(static_cast<uint64_t>(value), to);
    case kFakeF16: return FakeStore(ToF16(static_cast<float>(value)), to);
    case kFakeBf16: return FakeStore(ToBf16(static_cast<float>(value)), to);
    case kFakeF32: return FakeStore(static_cast<float>(value), to);
    default: return FakeStore(value, to);
  }
}

// `inputs` holds the elements of `ranks` ranks, one rank after another.
inline void FakeReduce(const uint8_t* inputs, int ranks, size_t count, int type, int op,
                       uint8_t* out) {
  const size_t size = FakeSizeOf(type);
  for (size_t i = 0; i < count; ++i) {
    double value = FakeRead(inputs + i * size, type);
    for (int rank = 1; rank < ranks; ++rank) {
      const double other = FakeRead(inputs + (rank * count + i) * size, type);
      switch (op) {
        case kFakeProd: value *= other; break;
        case kFakeMax: value = std::max(value, other); break;
        case kFakeMin: value = std::min(value, other); break;
        default: value += other;
      }
    }
    FakeWrite(op == kFakeAvg ? value / ranks : value, out + i * size, type);
  }
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_REDUCE_H_
