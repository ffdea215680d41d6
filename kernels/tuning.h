// The sizes that the kernels are tuned by. They change the time, never a byte.
#ifndef THINWIRE_KERNELS_TUNING_H_
#define THINWIRE_KERNELS_TUNING_H_

namespace thinwire::kernels {

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kThreads = 256;  // of a team, at most
inline constexpr unsigned kFewestThreads = 64;
// Consecutive elements that a thread loads at once: 16 bytes of fp32, a word of int8 codes.
inline constexpr unsigned kQuad = 4;
// Quads of a thread: with gradient and residual 128 bytes in flight for each of them.
inline constexpr unsigned kQuads = 4;
// Thread blocks of one multiprocessor that registers must suffice for; what selects entries, and
// what makes codes of widths, holds more in them.
// Three have more loads in flight than keep an H200's memory busy. With four, which get 64
// registers each, most kernels spill on sm_100 and sm_120: kernels/sass.md.
inline constexpr unsigned kBlocksPerMultiprocessor = 3;
inline constexpr unsigned kFewBlocksPerMultiprocessor = 2;
// A reduction has as many, but two on sm_120, where three spill; each multiprocessor has less
// memory traffic to hide there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
inline constexpr unsigned kReduceBlocksPerMultiprocessor = kFewBlocksPerMultiprocessor;
#else
inline constexpr unsigned kReduceBlocksPerMultiprocessor = kBlocksPerMultiprocessor;
#endif
// Tiles below which a launch takes smaller ones: the thread blocks that an H100 or H200 holds, of
// 132 multiprocessors.
inline constexpr unsigned kTilesToFill = 132 * kBlocksPerMultiprocessor;
// Jobs of one launch; more take another launch. The table travels as a kernel argument, of which
// there are 4 KiB.
inline constexpr unsigned kMaxJobs = 32;
inline constexpr unsigned kMaxWires = 256;  // of a reduction

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_TUNING_H_
