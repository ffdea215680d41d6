// Twins: loops that move the same bytes as a codec operation and do nothing else. The extra time of
// a codec is the cost of its arithmetic.
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

// The memory that an operation moves, aligned to 64 bytes. Null is not accessed.
struct Moved {
  const float* gradient = nullptr;    // read
  float* residual = nullptr;          // read and written
  const uint8_t* codes_in = nullptr;  // read
  float* floats = nullptr;            // written; read before, if `add`
  bool add = false;
  uint8_t* codes_out = nullptr;  // written
  size_t numel = 0;              // a multiple of 256, of 1024 below 2 bits
  double bits = 32;              // per code: 32, 16, 8, 4, 2, 1 or 0.5
};

// Moves it; supports the combinations that codecs have.
void Move(const Moved& moved);

}  // namespace thinwire::twin

#endif  // THINWIRE_BENCH_TWINS_H_
