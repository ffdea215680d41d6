#include "schedule/plan.h"

#include <algorithm>
#include <numeric>

#include "schedule/hash.h"

namespace thinwire {
namespace {

std::vector<size_t> ShardBounds(Range chunk, int world, size_t block) {
  const size_t numel = chunk.end - chunk.begin;
  const size_t blocks = (numel + block - 1) / block;
  std::vector<size_t> bounds(world + 1);
  for (int r = 0; r <= world; ++r) {
    bounds[r] = chunk.begin + std::min(numel, blocks * r / world * block);
  }
  return bounds;
}

}  // namespace

Plan MakePlan(size_t numel, int world, const Options& options) {
  const size_t unit = std::lcm(kChunkAlignment, size_t{options.codec.block});
  const size_t step = std::max(unit, options.chunk_bytes / sizeof(float) / unit * unit);
  Plan plan;
  for (size_t begin = 0; begin < numel; begin += step) {
    const Range range{begin, std::min(numel, begin + step)};
    plan.chunks.push_back({range, ShardBounds(range, world, options.codec.block)});
  }
  return plan;
}

std::vector<Range> Plan::OwnedBy(int rank) const {
  std::vector<Range> owned;
  for (const Chunk& chunk : chunks) {
    const Range shard = chunk.shard(rank);
    if (shard.begin != shard.end) owned.push_back(shard);
  }
  return owned;
}

uint64_t Plan::Hash() const {
  uint64_t hash = chunks.size();
  for (const Chunk& chunk : chunks) {
    for (const size_t bound : chunk.bounds) hash = HashCombine(hash, bound);
  }
  return hash;
}

}  // namespace thinwire
