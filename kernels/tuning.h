// The sizes by which the kernels are tuned. They affect only the time, never a byte.
#ifndef THINWIRE_KERNELS_TUNING_H_
#define THINWIRE_KERNELS_TUNING_H_

namespace thinwire::kernels {

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kThreads = 256;  // of a team, at most
inline constexpr unsigned kFewestThreads = 64;
// Consecutive elements that a thread loads at once: 16 bytes of fp32, a word of int8 codes.
inline constexpr unsigned kQuad = 4;
// Quads per thread: with gradient and residual each thread has 128 bytes in flight.
inline constexpr unsigned kQuads = 4;
// Thread blocks per multiprocessor for which registers must suffice; kernels that select entries or
// make codes of widths need more registers, so they have fewer blocks. Three have more loads in
// flight than an H200 needs to keep its memory busy. With four, which get 64 registers per thread,
// most kernels spill on sm_100 and sm_120: kernels/sass.md.
inline constexpr unsigned kBlocksPerMultiprocessor = 3;
inline constexpr unsigned kFewBlocksPerMultiprocessor = 2;
// A reduction has three as well, except on sm_120, where three spill and it has two; each
// multiprocessor there has less memory traffic to hide.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
inline constexpr unsigned kReduceBlocksPerMultiprocessor = kFewBlocksPerMultiprocessor;
#else
inline constexpr unsigned kReduceBlocksPerMultiprocessor = kBlocksPerMultiprocessor;
#endif
// Launches with fewer tiles than this use smaller ones: the number of thread blocks that fit on an
// H100 or H200, with 132 multiprocessors.
inline constexpr unsigned kTilesToFill = 132 * kBlocksPerMultiprocessor;
// Jobs per launch; more jobs take another launch. The table is a kernel argument, of which there
// are at most 4 KiB.
inline constexpr unsigned kMaxJobs = 32;
inline constexpr unsigned kMaxWires = 256;  // per reduction

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_TUNING_H_
