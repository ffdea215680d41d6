// Twins: loops that move the same bytes as a codec operation and do nothing else. What a codec
// takes beyond its twin is the price of its arithmetic. Pointers are aligned to 64 bytes, n is a
// multiple of 256 (of 1024 below 2 bits), `bits` is the code width of an element (8, 4, 0.5; 16 for
// bf16, 32 for fp32).
#ifndef THINWIRE_BENCH_TWINS_H_
#define THINWIRE_BENCH_TWINS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace thinwire::twin {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Zeroed memory of whole pages.
template <typename T>
std::unique_ptr<T, Free> Aligned(size_t count) {
  const size_t bytes = (count * sizeof(T) + 4095) / 4096 * 4096;
  auto* memory = static_cast<T*>(std::aligned_alloc(4096, bytes));
  std::fill_n(reinterpret_cast<uint8_t*>(memory), bytes, uint8_t{0});
  return std::unique_ptr<T, Free>(memory);
}

// r += g, and a store of the code bytes.
void EncodeWithFeedback(const float* g, float* r, uint8_t* codes, size_t n, double bits);
// r += g: what topk with feedback moves, whose entries are few.
void Accumulate(const float* g, float* r, size_t n);
// g is read, and the code bytes are stored.
void Encode(const float* g, uint8_t* codes, size_t n, double bits);
// The code bytes are read, and out is stored.
void Decode(const uint8_t* codes, float* out, size_t n, double bits);
// The code bytes are read, and sum is read, added to and stored.
void DecodeAdd(const uint8_t* codes, float* sum, size_t n, double bits);
// own and a peer's codes are read, r is read and stored, out and own codes are stored.
void Reduce(const float* own, const uint8_t* peer, float* r, float* out, uint8_t* codes, size_t n,
            double bits);

}  // namespace thinwire::twin

#endif  // THINWIRE_BENCH_TWINS_H_
