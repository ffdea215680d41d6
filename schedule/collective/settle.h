// Settled: the options of a group as its engine runs them, which depend on how many ranks there are
// and on their links. Settle decides on codecs, on the topology and on the size of chunks.
//
// Pure functions of what all ranks know, so that they decide alike, and the simulator as they do.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_SETTLE_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_SETTLE_H_

#include <cstddef>
#include <optional>
#include <span>
#include <utility>

#include "compress/codec_spec.h"
#include "schedule/collective/partition.h"
#include "schedule/options.h"

namespace thinwire {

// Bytes a second that a rank sends while all ranks do: its share of what its node's link carries.
struct LinkRates {
  double inside = 0.0, between = 0.0;
};

// Only Settle makes it, so whoever gets one knows that its codecs, topology and chunk_bytes hold.
class Settled {
 public:
  const Options& operator*() const { return options_; }
  const Options* operator->() const { return &options_; }
  int world() const { return world_; }

 private:
  friend Settled Settle(Options options, int world, const std::optional<LinkRates>& rates);
  Settled(Options options, int world) : options_(std::move(options)), world_(world) {}

  Options options_;
  int world_;
};

// Codecs first, since topk becomes int4 where that costs fewer bytes, and is then exchanged by
// nodes as any dense codec is; then the topology; then the size of chunks, which depends on both.
//
// `rates`: of the links inside nodes of options.local_size ranks, and between them, if they are
// known; kAuto then becomes kHierarchical where that pays. In a world of one nothing changes.
Settled Settle(Options options, int world, const std::optional<LinkRates>& rates = std::nullopt);

// Topology. Bytes that a rank sends for one element of a chunk, in the hops of an allreduce, on the
// links inside nodes and between them.
struct LinkBytes {
  double inside = 0.0, between = 0.0;
  double seconds(const LinkRates& rates) const {
    return inside / rates.inside + between / rates.between;
  }
};

// `nodes`: a row is a node. Of fp32 elements.
LinkBytes FlatBytes(const Grid& nodes, const CodecPair& codec);
LinkBytes HierarchicalBytes(const Grid& nodes, const CodecPair& codec);

// True if every dense codec gains kWorthIt by going by nodes; false if there is none.
bool HierarchyPays(const Grid& nodes, std::span<const CodecPair> codecs, const LinkRates& rates);

// Less could as well be the error of a measurement, and the bits of results would change from one
// start to the next.
inline constexpr double kWorthIt = 1.25;

// Size of chunks. A chunk costs every rank n - 1 messages a hop whatever its size, so where n grows
// and chunks do not, messages shrink until their fixed costs rule.
//
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

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_SETTLE_H_
