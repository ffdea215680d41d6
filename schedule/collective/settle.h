// Settled: the options that a group's engine runs with, which depend on the number of ranks and on
// their links. Settle decides the codecs, the topology and the size of chunks.
//
// Pure functions of what all ranks know, so all ranks and the simulator decide alike.
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

// Bytes per second that a rank sends while all ranks send: its share of its node's link.
struct LinkRates {
  double inside = 0.0, between = 0.0;
};

// Only Settle makes this, so its codecs, topology and chunk_bytes are always settled.
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

// Decides the codecs first, since topk becomes int4 if that costs fewer bytes, and is then
// exchanged hierarchically like any dense codec; then the topology; then the size of chunks, which
// depends on both.
//
// `rates`: of the links inside nodes of options.local_size ranks and between them, if they are
// known; kAuto then becomes kHierarchical if that pays. In a world of one nothing changes.
Settled Settle(Options options, int world, const std::optional<LinkRates>& rates = std::nullopt);

// Topology. Bytes that a rank sends for one element of a chunk, in the hops of an allreduce, on the
// links inside nodes and between them.
struct LinkBytes {
  double inside = 0.0, between = 0.0;
  double seconds(const LinkRates& rates) const {
    return inside / rates.inside + between / rates.between;
  }
};

// For fp32 elements. `nodes`: a row is a node.
LinkBytes FlatBytes(const Grid& nodes, const CodecPair& codec);
LinkBytes HierarchicalBytes(const Grid& nodes, const CodecPair& codec);

// True if by nodes every dense codec is kWorthIt times faster; false if there is no dense codec.
bool HierarchyPays(const Grid& nodes, std::span<const CodecPair> codecs, const LinkRates& rates);

// A smaller gain could be a measurement error, and the bits of results would then change from one
// start to the next.
inline constexpr double kWorthIt = 1.25;

// Size of chunks. A chunk costs every rank n - 1 messages per hop whatever its size, so if n grows
// and chunks do not, messages shrink until their fixed costs dominate.
//
// Average wire bytes of a rank's messages, over all hops of the allreduce of a chunk of
// `chunk_bytes` fp32 bytes with a dense codec.
double MessageBytes(const CodecPair& codec, size_t chunk_bytes, int world, const Options& options);

// options.chunk_bytes (over NCCL at least kGpuChunk), doubled until the messages of every dense
// codec hold options.least_message_bytes (in a grid kGridFactor times as much), but at most
// kLargestChunk (in a grid with kManyLoops or more loops kLargestOfManyLoops). Not doubled in
// worlds of up to kSmallWorld ranks. A size that the user sets stays.
size_t ChunkBytesOf(const Options& options, int world);

// For chunks that others must overtake, since a chunk under way can't be overtaken: decision 2.
inline constexpr size_t kOvertakenChunk = size_t{1} << 20;
// An eighth of it (the part of each of 8 ranks) is 256 tiles of a kernel (kernels/tile.h), which
// fill a GPU, so launches cost little in comparison. Not used under p3, whose chunks must be
// overtaken.
inline constexpr size_t kGpuChunk = size_t{32} << 20;
inline constexpr int kSmallWorld = 4;
// A grid has so few messages that larger ones, which cost less, do not require large chunks.
inline constexpr int kGridFactor = 4;
// A lane's memory grows with its chunks; buckets are hardly ever larger.
inline constexpr size_t kLargestChunk = size_t{256} << 20;
// Many loops share the cost of a grid's messages. The time that matters then is that for encoding
// the first chunk and decoding the last one, while the link is idle: decision 36.
inline constexpr int kManyLoops = 4;
inline constexpr size_t kLargestOfManyLoops = size_t{32} << 20;

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_SETTLE_H_
