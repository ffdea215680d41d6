// Twins: loops that move the same bytes as a codec operation and do nothing else. What a codec
// takes beyond its twin is the price of its arithmetic. Pointers are aligned to 64 bytes, n is a
// multiple of 256 (of 1024 below 2 bits), `bits` is the code width of an element (8, 4, 0.5; 16 for
// bf16, 32 for fp32).
#ifndef THINWIRE_BENCH_TWINS_H_
#define THINWIRE_BENCH_TWINS_H_

#include <cstddef>
#include <cstdint>

namespace thinwire::twin {

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
