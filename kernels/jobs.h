// The launches as plain structs, which are passed as kernel arguments. Pointers are device pointers
// unless a comment says otherwise. kernels/device_backend.cc fills them in.
#ifndef THINWIRE_KERNELS_JOBS_H_
#define THINWIRE_KERNELS_JOBS_H_

#include <cstddef>
#include <cstdint>

#include "compress/types.h"
#include "kernels/tuning.h"

namespace thinwire::kernels {

// A CodecSpec, without the parameters of codecs that have no kernels.
struct Codec {
  CodecId id;  // has kernels
  bool hadamard;
  uint32_t block_bits;  // a block has 1 << block_bits elements: shifts are cheap, divisions are not
  uint32_t signs[8];    // transform: bit i % 32 of word i / 32 is set if element i is negated
  uint32_t sixteenths;  // codecs of widths: bits per code, the mean of a shard, times 16; else 0
  uint32_t floor;       // codecs of widths: least bits per code
};

// Wire bytes of one shard; 16-byte aligned.
struct Wire {
  uint8_t* data;
  size_t codes_at;  // bytes before the codes
  size_t bytes;     // in total
};

// Contiguous elements, aligned to one element.
struct Elements {
  void* data;
  bool quads;  // a quad may be loaded at once
};

struct EncodeJob {
  Elements gradient;
  Elements velocity;  // floats; data null: none
  Elements residual;  // floats; data null: none
  Wire wire;
  size_t numel;
  float beta;           // of the velocity
  uint32_t first_tile;  // index of its first tile among the launch's
};

struct DecodeJob {
  Wire wire;
  Elements out;
  size_t numel;
  uint32_t first_tile;
};

// sum = factor * base + gradient
struct AccumulateJob {
  Elements gradient, base, sum;  // base and sum are floats and may be the same
  float factor;
  size_t numel;
  uint32_t first_tile;
};

// The end of a step of momentum; see Backend::EndMomentum.
struct MomentumJob {
  Elements m, velocity;  // floats
  Elements out;          // of the launch's dtype; data null: not needed
  size_t numel;
  uint32_t first_tile;
};

template <typename Job, unsigned kMax>
struct Jobs {
  Job job[kMax];
  uint32_t count;
  uint32_t tiles;    // in all jobs
  uint32_t threads;  // per team: a tile is TileOf(threads) elements (tile.h)
};

// `room`: RoomOf(launch) bytes of scratch (widths.h); null: taken from a pool of the device.
struct EncodeLaunch {
  Codec codec;
  DType dtype;  // of the gradients
  Jobs<EncodeJob, kMaxJobs> jobs;
  uint8_t* room;
};

struct DecodeLaunch {
  Codec codec;
  DType dtype;  // of the outputs
  bool add;     // to the outputs, which must be f32
  Jobs<DecodeJob, kMaxJobs> jobs;
  uint8_t* room;
};

struct AccumulateLaunch {
  DType dtype;  // of the gradients
  Jobs<AccumulateJob, kMaxJobs> jobs;
};

struct MomentumLaunch {
  DType dtype;  // of the outputs
  float beta;
  bool nesterov;
  Jobs<MomentumJob, kMaxJobs> jobs;
};

struct ReduceLaunch {
  Codec up, down;
  DType dtype;        // of `own` and `out`
  Elements own, out;  // may be the same
  Elements residual;  // floats; data null: none
  Wire wire_out;      // data null: not needed
  size_t up_codes_at;
  size_t numel;
  float scale;
  uint32_t ranks, tiles, threads;   // tiles and threads as in Jobs
  const uint8_t* wires[kMaxWires];  // by rank; null: own shard
  uint8_t* room;
};

inline constexpr size_t kArgumentBytes = 4096;
static_assert(sizeof(EncodeLaunch) <= kArgumentBytes && sizeof(DecodeLaunch) <= kArgumentBytes);
static_assert(sizeof(AccumulateLaunch) <= kArgumentBytes && sizeof(ReduceLaunch) <= kArgumentBytes);
static_assert(sizeof(MomentumLaunch) <= kArgumentBytes);

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_JOBS_H_
