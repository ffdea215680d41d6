// The few types that every layer shares. compress/ includes nothing of ours, so they live here.
#ifndef THINWIRE_COMPRESS_TYPES_H_
#define THINWIRE_COMPRESS_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>

namespace thinwire {

// Element types of gradients. The values are part of the C ABI and of the handshake.
enum class DType : uint8_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

constexpr size_t SizeOf(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

constexpr std::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBF16: return "bf16";
    case DType::kF16: return "f16";
  }
  return "unknown dtype";
}

// Contiguous elements, not owned, of the host or of the device that the user of the view works
// with. On the host `data` needs only the alignment of a byte, on a device that of an element:
// frameworks hand out slices at any element, and C callers at any address.
struct TensorView {
  void* data = nullptr;
  size_t numel = 0;
  DType dtype = DType::kF32;

  size_t bytes() const { return numel * SizeOf(dtype); }

  // Elements [offset, offset + count); the caller keeps the range inside the view.
  TensorView Slice(size_t offset, size_t count) const {
    return {static_cast<uint8_t*>(data) + offset * SizeOf(dtype), count, dtype};
  }
};

// Elements [begin, end) of a bucket.
struct Range {
  size_t begin = 0;
  size_t end = 0;
  friend bool operator==(const Range&, const Range&) = default;
};

// A momentum that the exchange owns, in place of the optimizer: the engine's, or topk's local one.
struct Momentum {
  float beta = 0.0f;
  bool nesterov = false;      // as torch.optim.SGD's
  float* velocity = nullptr;  // a float for each element; null: none, and beta is not read

  Momentum From(size_t element) const {
    return {beta, nesterov, velocity == nullptr ? nullptr : velocity + element};
  }
};

// Elements at any alignment.
template <typename T>
T Get(const void* base, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const uint8_t*>(base) + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void Put(void* base, size_t i, T value) {
  std::memcpy(static_cast<uint8_t*>(base) + i * sizeof(T), &value, sizeof(T));
}

using Bytes = std::span<const uint8_t>;
using MutableBytes = std::span<uint8_t>;

// Memory of a device, or pinned memory of the host for one, which its last owner frees.
using DeviceMemory = std::shared_ptr<uint8_t[]>;

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_TYPES_H_
