#include "schedule/sim/wire.h"

#include "schedule/collective/algorithm.h"
#include "schedule/collective/grid.h"

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
  return direct(unit) ? 1 : AlgorithmOf({static_cast<uint32_t>(unit), 0})->hops();
}

std::vector<Phase> Wire::phases(const ChunkId& id) const {
  const CodecSpec& up = setting_.engine.codecs[0].up;
  const double encode_s = setting_.codec.encode_s * static_cast<double>(numel(id));
  // Entries have one hop: everybody's go to everybody.
  if (AlgorithmOf(id) == &Entries()) {
    const auto bytes = static_cast<double>(EncodedBytes(up, numel(id)));
    return {Among(encode_s, bytes * (setting_.ranks - 1), setting_.ranks - 1)};
  }
  const Chunk& chunk = partitions_[id.unit].chunks[id.chunk];
  return chunk.algorithm->hops() == 4 ? GridPhases(chunk) : FlatPhases(numel(id));
}

double Wire::last_compute_s(const ChunkId& id) const {
  const double reduce_s = AlgorithmOf(id) == &Entries() ? setting_.codec.reduce_s : 0.0;
  return (reduce_s + setting_.codec.decode_s) * static_cast<double>(numel(id));
}

std::vector<Phase> Wire::FlatPhases(size_t numel) const {
  const CodecPair& codec = setting_.engine.codecs[0];
  const auto elements = static_cast<double>(numel);
  const int peers = setting_.ranks - 1;
  const double foreign = static_cast<double>(peers) / setting_.ranks;
  const auto up = static_cast<double>(EncodedBytes(codec.up, numel));
  const auto down = static_cast<double>(EncodedBytes(codec.down, numel));
  return {Among(setting_.codec.encode_s * elements, up * foreign, peers),
          Among(setting_.codec.reduce_s * elements, down * foreign, peers)};
}

// As many bytes to each of all other ranks, some of which may be on the same node.
Phase Wire::Among(double compute_s, double bytes, int peers) const {
  if (setting_.inside_bytes_per_s == 0.0) return {compute_s, bytes, peers};
  Options by_nodes = setting_.engine;
  by_nodes.topology = Topology::kHierarchical;
  const Grid nodes = GridFor(setting_.ranks, by_nodes);
  const double neighbours = nodes.rows > 1 ? nodes.columns - 1 : 0;
  const double inside = bytes * neighbours / peers;
  return {compute_s, bytes - inside, peers, inside};
}

// The phases of schedule/collective/two_level.cc. Along a row goes the foreign columns' part of a
// chunk, and along a column the foreign rows' part of that. Rows that are nodes have links of their
// own, and fp32 on its way to the sum.
std::vector<Phase> Wire::GridPhases(const Chunk& chunk) const {
  const CodecPair& codec = setting_.engine.codecs[0];
  const size_t numel = chunk.numel();
  const Grid grid = GridOf(chunk);
  const auto elements = static_cast<double>(numel);
  const int of_row = grid.columns - 1, of_column = grid.rows - 1;
  const double row = static_cast<double>(of_row) / grid.columns;
  const double column = static_cast<double>(of_column) / setting_.ranks;
  const auto up = static_cast<double>(EncodedBytes(codec.up, numel));
  const auto down = static_cast<double>(EncodedBytes(codec.down, numel));
  const double again_s = setting_.codec.encode_s * elements / grid.columns;
  if (chunk.algorithm == &Hierarchical()) {
    const double fp32 = sizeof(float) * elements * row;
    const bool own_links = setting_.inside_bytes_per_s != 0.0;
    const auto inside = [&](double bytes) {
      return own_links ? Phase{0.0, 0.0, of_row, bytes} : Phase{0.0, bytes, of_row};
    };
    return {inside(fp32),
            {setting_.codec.reduce_s * elements + again_s, up * column, of_column},
            {setting_.codec.reduce_s * elements / grid.columns, down * column, of_column},
            inside(down * row)};
  }
  return {{setting_.codec.encode_s * elements, up * row, of_row},
          {setting_.codec.reduce_s * elements + again_s, up * column, of_column},
          {setting_.codec.reduce_s * elements / grid.columns, down * column, of_column},
          {0.0, down * row, of_row}};
}

}  // namespace thinwire::sim
