#include "schedule/sim/wire.h"

#include "schedule/collective/algorithm.h"
#include "schedule/collective/partition.h"

namespace thinwire::sim {

Wire::Wire(const Setting& setting) : setting_(setting) {
  for (const Unit& unit : setting.profile.units) {
    const Segment segment{.name = "u", .offset = 0, .count = unit.numel, .total = unit.numel};
    partitions_.push_back(MakePartition({&segment, 1}, setting.ranks, setting.engine));
    const auto number = static_cast<uint32_t>(direct_.size());
    direct_.push_back(DirectExchangeOf({&segment, 1}, DType::kF32, setting.ranks, setting.engine));
    double bytes = direct_phase(number).bytes;
    if (!direct(number)) {
      bytes = 0;
      for (uint32_t c = 0; c < partitions_.back().chunks.size(); ++c) {
        for (const Phase& phase : phases({number, c})) bytes += phase.bytes;
      }
    }
    link_s_.push_back(bytes / setting.bytes_per_s);
  }
}

uint32_t Wire::chunks(size_t unit) const {
  return direct(unit) ? 1 : static_cast<uint32_t>(partitions_[unit].chunks.size());
}

int Wire::hops(size_t unit) const {
  return direct(unit) ? 1 : AlgorithmOf({static_cast<uint32_t>(unit), 0})->hops;
}

double Wire::compute_s(const PhaseCost& cost) const {
  const CodecCost& codec = setting_.codec;
  return codec.encode_s * cost.encoded + codec.reduce_s * cost.reduced +
         codec.decode_s * cost.decoded;
}

std::vector<Phase> Wire::phases(const ChunkId& id) const {
  const Chunk& chunk = partitions_[id.unit].chunks[id.chunk];
  std::vector<Phase> phases;
  for (const PhaseCost& cost : chunk.algorithm->costs(chunk, setting_.engine.codecs[0])) {
    if (cost.to == PhaseCost::To::kEverybody) {
      phases.push_back(Among(compute_s(cost), cost.bytes, cost.peers));
      continue;
    }
    // With inside_bytes_per_s, nodes have separate links inside.
    const bool inside = cost.to == PhaseCost::To::kNode && setting_.inside_bytes_per_s != 0.0;
    phases.push_back(
        {compute_s(cost), inside ? 0.0 : cost.bytes, cost.peers, inside ? cost.bytes : 0.0});
  }
  return phases;
}

// `bytes` go in equal parts to all other ranks, some of which may be on the same node.
Phase Wire::Among(double compute_s, double bytes, int peers) const {
  if (setting_.inside_bytes_per_s == 0.0 || peers == 0) return {compute_s, bytes, peers};
  Options by_nodes = setting_.engine;
  by_nodes.topology = Topology::kHierarchical;
  const Grid nodes = GridFor(setting_.ranks, by_nodes);
  const double neighbours = nodes.rows > 1 ? nodes.columns - 1 : 0;
  const double inside = bytes * neighbours / peers;
  return {compute_s, bytes - inside, peers, inside};
}

}  // namespace thinwire::sim
