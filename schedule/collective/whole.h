// WholeAlgorithm: the part that algorithms share in which nobody owns a shard.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_WHOLE_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_WHOLE_H_

#include <memory>
#include <string_view>
#include <vector>

#include "schedule/collective/algorithm.h"

namespace thinwire {

template <typename Run>
class WholeAlgorithm final : public Algorithm {
 public:
  WholeAlgorithm(std::string_view name, int hops, bool keeps_residuals)
      : name_(name), hops_(hops), keeps_residuals_(keeps_residuals) {}

  std::string_view name() const override { return name_; }
  int hops() const override { return hops_; }
  std::vector<size_t> ShardBounds(Range chunk, int world, size_t) const override {
    return std::vector<size_t>(world + 1, chunk.end);
  }
  Range SecondHop(const Chunk&, int) const override { return {}; }
  bool keeps_residuals() const override { return keeps_residuals_; }
  std::unique_ptr<ChunkRun> Begin(const ChunkJob& job, const Bench& bench) const override {
    return std::make_unique<Run>(job, bench);
  }

 private:
  const std::string_view name_;
  const int hops_;
  const bool keeps_residuals_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_WHOLE_H_
