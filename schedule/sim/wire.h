// Wire: a setting's units on the link: their chunks, and the bytes of each hop.
#ifndef THINWIRE_SCHEDULE_SIM_WIRE_H_
#define THINWIRE_SCHEDULE_SIM_WIRE_H_

#include <cstdint>
#include <vector>

#include "schedule/collective/algorithm.h"
#include "schedule/collective/partition.h"
#include "schedule/sim/simulator.h"

namespace thinwire::sim {

// A chunk of a unit in a step.
struct ChunkId {
  uint32_t unit = 0;
  uint32_t chunk = 0;
  int step = 0;
  friend bool operator==(const ChunkId&, const ChunkId&) = default;
};

// A phase of a chunk: a rank computes, and then sends.
struct Phase {
  double compute_s = 0.0;
  double bytes = 0.0;
  int messages = 0;
  double inside = 0.0;  // bytes on the links inside nodes
};

class Wire {
 public:
  explicit Wire(const Setting& setting);

  size_t units() const { return partitions_.size(); }
  size_t numel(size_t unit) const { return setting_.profile.units[unit].numel; }
  // True for small units, which go in one exchange and without a lane; they have one chunk.
  bool direct(size_t unit) const { return direct_[unit].algorithm != nullptr; }
  uint32_t chunks(size_t unit) const;
  size_t numel(const ChunkId& id) const { return partitions_[id.unit].chunks[id.chunk].numel(); }

  // The phases, with the costs from the chunk's algorithm. The last one has no hop.
  std::vector<Phase> phases(const ChunkId& id) const;
  Phase direct_phase(size_t unit) const {
    return Among(0.0, static_cast<double>(direct_[unit].bytes), setting_.ranks - 1);
  }
  int hops(size_t unit) const;
  double link_s(size_t unit) const { return link_s_[unit]; }  // of all its chunks together

 private:
  double compute_s(const PhaseCost& cost) const;
  Phase Among(double compute_s, double bytes, int peers) const;
  const Algorithm* AlgorithmOf(const ChunkId& id) const {
    return partitions_[id.unit].chunks[id.chunk].algorithm;
  }

  const Setting& setting_;
  std::vector<Partition> partitions_;   // by unit
  std::vector<DirectExchange> direct_;  // by unit
  std::vector<double> link_s_;
};

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_WIRE_H_
