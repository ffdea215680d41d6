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
    return {{encode_s, bytes * (setting_.ranks - 1), setting_.ranks - 1}};
  }
  return AlgorithmOf(id) == &TwoLevel() ? GridPhases(numel(id)) : FlatPhases(numel(id));
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
  return {{setting_.codec.encode_s * elements, up * foreign, peers},
          {setting_.codec.reduce_s * elements, down * foreign, peers}};
}

// The phases of schedule/collective/two_level.cc. Along a row goes the foreign columns' part of a
// chunk, and along a column the foreign rows' part of that.
std::vector<Phase> Wire::GridPhases(size_t numel) const {
  const CodecPair& codec = setting_.engine.codecs[0];
  const Grid grid = GridOf(setting_.ranks);
  const auto elements = static_cast<double>(numel);
  const int of_row = grid.columns - 1, of_column = grid.rows - 1;
  const double row = static_cast<double>(of_row) / grid.columns;
  const double column = static_cast<double>(of_column) / setting_.ranks;
  const auto up = static_cast<double>(EncodedBytes(codec.up, numel));
  const auto down = static_cast<double>(EncodedBytes(codec.down, numel));
  const double again_s = setting_.codec.encode_s * elements / grid.columns;
  return {{setting_.codec.encode_s * elements, up * row, of_row},
          {setting_.codec.reduce_s * elements + again_s, up * column, of_column},
          {setting_.codec.reduce_s * elements / grid.columns, down * column, of_column},
          {0.0, down * row, of_row}};
}

}  // namespace thinwire::sim
