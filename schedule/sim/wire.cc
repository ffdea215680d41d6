#include "schedule/sim/wire.h"

#include "schedule/collective/algorithm.h"

namespace thinwire::sim {

Wire::Wire(const Setting& setting) : setting_(setting) {
  for (const Unit& unit : setting.profile.units) {
    const Segment segment{.name = "u", .offset = 0, .count = unit.numel, .total = unit.numel};
    partitions_.push_back(MakePartition({&segment, 1}, setting.ranks, setting.engine));
    const auto number = static_cast<uint32_t>(direct_.size());
    direct_.push_back(DirectExchangeOf({&segment, 1}, DType::kF32, setting.ranks, setting.engine));
    double bytes = direct_bytes(number);
    if (!direct(number)) {
      bytes = 0;
      for (uint32_t c = 0; c < partitions_.back().chunks.size(); ++c) {
        bytes += up({number, c}) + down({number, c});
      }
    }
    link_s_.push_back(bytes / setting.bytes_per_s);
  }
}

uint32_t Wire::chunks(size_t unit) const {
  return direct(unit) ? 1 : static_cast<uint32_t>(partitions_[unit].chunks.size());
}

double Wire::HopBytes(const CodecSpec& spec, size_t numel) const {
  return static_cast<double>(EncodedBytes(spec, numel)) * (setting_.ranks - 1) / setting_.ranks;
}

bool Wire::is_sparse(const ChunkId& id) const {
  return partitions_[id.unit].chunks[id.chunk].algorithm == &Entries();
}

// Entries have one hop: everybody's go to everybody.
double Wire::up(const ChunkId& id) const {
  const double bytes = HopBytes(setting_.engine.codecs[0].up, numel(id));
  return is_sparse(id) ? bytes * setting_.ranks : bytes;
}

double Wire::down(const ChunkId& id) const {
  if (is_sparse(id)) return 0.0;
  return HopBytes(setting_.engine.codecs[0].down, numel(id));
}

}  // namespace thinwire::sim
