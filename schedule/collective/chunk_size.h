// The size of chunks in a world of n ranks. A chunk costs every rank n - 1 messages a hop whatever
// its size, so where n grows and chunks do not, messages shrink until their fixed costs rule.
//
// A pure function of the options and the world, so that all ranks agree without a word.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_CHUNK_SIZE_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_CHUNK_SIZE_H_

#include <cstddef>

#include "schedule/options.h"

namespace thinwire {

// The wire bytes of a dense codec's chunk of so many fp32 bytes over the messages that carry them:
// what a rank's messages hold on average, over all hops of the chunk's allreduce.
double MessageBytes(const CodecPair& codec, size_t chunk_bytes, int world, const Options& options);

// options.chunk_bytes, over NCCL kGpuChunk at least, doubled until the messages of every dense
// codec hold options.least_message_bytes, in a grid kGridFactor times as much, and no further than
// to kLargestChunk; in a grid with kManyLoops or more, to kLargestOfManyLoops. Worlds of up to
// kSmallWorld ranks are not looked at for their messages. A size that the user sets stays.
size_t ChunkBytesOf(const Options& options, int world);

// Where chunks are to be overtaken, since one that is on its way is not: decision 2.
inline constexpr size_t kOvertakenChunk = size_t{1} << 20;
// A part of it for each of 8 ranks is 256 tiles of a kernel (kernels/tile.h), which fill a GPU, and
// launches cost little beside it. It is not taken under p3, whose chunks are to be overtaken.
inline constexpr size_t kGpuChunk = size_t{32} << 20;
inline constexpr int kSmallWorld = 4;
// A grid's messages are so few that larger ones, which cost less, still make no large chunks.
inline constexpr int kGridFactor = 4;
// Memory of a lane grows with chunks; buckets are hardly ever larger.
inline constexpr size_t kLargestChunk = size_t{256} << 20;
// Many loops share what a grid's messages cost. What counts then is how long the first chunk is
// encoded and the last one decoded, while the link has nothing to do: decision 36.
inline constexpr int kManyLoops = 4;
inline constexpr size_t kLargestOfManyLoops = size_t{32} << 20;

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_CHUNK_SIZE_H_
