#include "schedule/settle.h"

#include "schedule/collective/chunk_size.h"
#include "schedule/collective/grid.h"

namespace thinwire {
namespace {

Topology TopologyOf(const Options& options, int world, const std::optional<LinkRates>& rates) {
  if (options.topology != Topology::kAuto || !rates.has_value()) return options.topology;
  Options by_nodes = options;
  by_nodes.topology = Topology::kHierarchical;
  if (!GoesByNodes(world, by_nodes)) return options.topology;
  const bool pays = HierarchyPays(GridFor(world, by_nodes), options.codecs, *rates);
  return pays ? by_nodes.topology : options.topology;
}

}  // namespace

Settled Settle(Options options, int world, const std::optional<LinkRates>& rates) {
  if (world > 1) {
    for (CodecPair& codec : options.codecs) codec = codec.ForWorld(world);
    options.topology = TopologyOf(options, world, rates);
    options.chunk_bytes = ChunkBytesOf(options, world);
  }
  return Settled(std::move(options), world);
}

}  // namespace thinwire
