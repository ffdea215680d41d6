// The allreduce as DESIGN says it, for all ranks at once, one chunk after the other, on the scalar
// codecs: what an engine must reproduce bit for bit, residuals included.
#ifndef THINWIRE_TESTS_SCHEDULE_REFERENCE_H_
#define THINWIRE_TESTS_SCHEDULE_REFERENCE_H_

#include <vector>

#include "compress/backend.h"
#include "schedule/options.h"
#include "schedule/plan.h"

namespace thinwire {

class ReferenceAllReduce {
 public:
  ReferenceAllReduce(int world, const Options& options, bool feedback)
      : world_(world), options_(options), feedback_(feedback) {}

  // One step: gradients by rank; returns what every rank must get.
  std::vector<float> Step(std::vector<std::vector<float>> gradients, float scale) {
    const size_t numel = gradients[0].size();
    if (residuals_.empty()) residuals_.assign(world_, std::vector<float>(numel));
    std::vector<float> result(numel);
    for (const Chunk& chunk : MakePlan(numel, world_, options_).chunks) {
      for (int owner = 0; owner < world_; ++owner) {
        ReduceShard(gradients, chunk.shard(owner), owner, scale, result);
      }
    }
    return result;
  }

 private:
  void ReduceShard(std::vector<std::vector<float>>& gradients, Range shard, int owner, float scale,
                   std::vector<float>& result) {
    const size_t numel = shard.end - shard.begin;
    const Backend& codecs = ScalarBackend();
    std::vector<uint8_t> wire(EncodedBytes(options_.codec, numel));
    std::vector<float> sum, decoded(numel);
    for (int r = 0; r < world_; ++r) {
      float* residual = feedback_ ? residuals_[r].data() + shard.begin : nullptr;
      const TensorView own{gradients[r].data() + shard.begin, numel};
      if (r == owner) {
        decoded.assign(gradients[r].begin() + shard.begin, gradients[r].begin() + shard.end);
      } else {
        codecs.Encode(options_.codec, own, residual, wire.data());
        codecs.Decode(options_.codec, wire.data(), {decoded.data(), numel});
      }
      if (sum.empty()) {
        sum = decoded;
      } else {
        for (size_t i = 0; i < numel; ++i) sum[i] += decoded[i];
      }
    }
    for (float& value : sum) value *= scale;
    float* residual = feedback_ ? residuals_[owner].data() + shard.begin : nullptr;
    codecs.Encode(options_.codec, {sum.data(), numel}, residual, wire.data());
    codecs.Decode(options_.codec, wire.data(), {result.data() + shard.begin, numel});
  }

  const int world_;
  const Options options_;
  const bool feedback_;
  std::vector<std::vector<float>> residuals_;
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_SCHEDULE_REFERENCE_H_
