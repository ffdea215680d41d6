#include "schedule/collective/settle.h"

#include <algorithm>

namespace thinwire {
namespace {

// Elements; large enough that scales and padding have the same share as in a chunk.
constexpr size_t kSample = size_t{1} << 20;

double BytesPerElement(const CodecSpec& spec) {
  return static_cast<double>(EncodedBytes(spec, kSample)) / kSample;
}

}  // namespace

LinkBytes FlatBytes(const Grid& nodes, const CodecPair& codec) {
  const double world = nodes.rows * nodes.columns;
  const double both = BytesPerElement(codec.up) + BytesPerElement(codec.down);
  return {.inside = both * (nodes.columns - 1) / world,
          .between = both * (world - nodes.columns) / world};
}

LinkBytes HierarchicalBytes(const Grid& nodes, const CodecPair& codec) {
  const double up = BytesPerElement(codec.up), down = BytesPerElement(codec.down);
  const double foreign_columns = (nodes.columns - 1.0) / nodes.columns;
  const double foreign_rows = (nodes.rows - 1.0) / nodes.rows;
  return {.inside = foreign_columns * (sizeof(float) + down),
          .between = foreign_rows / nodes.columns * (up + down)};
}

bool HierarchyPays(const Grid& nodes, std::span<const CodecPair> codecs, const LinkRates& rates) {
  bool pays = false;
  for (const CodecPair& codec : codecs) {
    if (codec.up.traits().entries()) continue;  // topk's entries go to every rank in any case
    pays = true;
    const double seconds = HierarchicalBytes(nodes, codec).seconds(rates);
    if (FlatBytes(nodes, codec).seconds(rates) < kWorthIt * seconds) return false;
  }
  return pays;
}

double MessageBytes(const CodecPair& codec, size_t chunk_bytes, int world, const Options& options) {
  const size_t numel = chunk_bytes / sizeof(float);
  const auto both =
      static_cast<double>(EncodedBytes(codec.up, numel) + EncodedBytes(codec.down, numel));
  // Flat and by grid, a rank sends (n - 1)/n of a chunk in each direction.
  const double sent = both * (world - 1) / world;
  const int messages = GoesByGrid(world, options) ? GridOf(world).messages() : world - 1;
  return sent / (2 * messages);
}

namespace {

Topology TopologyOf(const Options& options, int world, const std::optional<LinkRates>& rates) {
  if (options.topology != Topology::kAuto || !rates.has_value()) return options.topology;
  Options by_nodes = options;
  by_nodes.topology = Topology::kHierarchical;
  if (!GoesByNodes(world, by_nodes)) return options.topology;
  const bool pays = HierarchyPays(GridFor(world, by_nodes), options.codecs, *rates);
  return pays ? by_nodes.topology : options.topology;
}

double LeastMessage(const Options& options, int world) {
  const auto least = static_cast<double>(options.least_message_bytes);
  return GoesByGrid(world, options) ? kGridFactor * least : least;
}

size_t LargestChunk(const Options& options, int world) {
  const bool shared = options.loops >= kManyLoops && GoesByGrid(world, options);
  return shared ? kLargestOfManyLoops : kLargestChunk;
}

}  // namespace

size_t ChunkBytesOf(const Options& options, int world) {
  size_t bytes = options.chunk_bytes;
  if (options.least_message_bytes == 0) return bytes;  // set by the user
  const bool overtaken = options.policy == Policy::kP3;
  if (options.transport == TransportKind::kNccl && !overtaken) bytes = std::max(bytes, kGpuChunk);
  if (world <= kSmallWorld) return bytes;
  const double least = LeastMessage(options, world);
  const size_t largest = LargestChunk(options, world);
  for (const CodecPair& codec : options.codecs) {
    if (codec.up.traits().entries()) continue;  // every rank's whole chunk goes to every rank
    while (bytes < largest && MessageBytes(codec, bytes, world, options) < least) bytes *= 2;
  }
  return bytes;
}

Settled Settle(Options options, int world, const std::optional<LinkRates>& rates) {
  if (world > 1) {
    for (CodecPair& codec : options.codecs) codec = codec.ForWorld(world);
    options.topology = TopologyOf(options, world, rates);
    options.chunk_bytes = ChunkBytesOf(options, world);
  }
  return Settled(std::move(options), world);
}

}  // namespace thinwire
