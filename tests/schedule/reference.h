// The allreduce as DESIGN describes it, for all ranks at once, one chunk after the other, on the
// scalar codecs. An engine must reproduce it bit for bit, residuals and momentum included.
#ifndef THINWIRE_TESTS_SCHEDULE_REFERENCE_H_
#define THINWIRE_TESTS_SCHEDULE_REFERENCE_H_

#include <cmath>
#include <vector>

#include "compress/backend.h"
#include "schedule/collective/algorithm.h"
#include "schedule/collective/partition.h"
#include "schedule/hash.h"
#include "schedule/options.h"

namespace thinwire {

// The allreduce of one tensor of one parameter, named "g".
class ReferenceAllReduce {
 public:
  ReferenceAllReduce(int world, const Options& options) : world_(world), options_(options) {}

  // Runs one step on gradients by rank; returns the result that every rank must get.
  std::vector<float> Step(std::vector<std::vector<float>> gradients, float scale) {
    const size_t numel = gradients[0].size();
    if (residuals_.empty()) {
      residuals_.assign(world_, std::vector<float>(numel));
      velocities_ = residuals_;
    }
    const std::vector<Segment> all = {{.name = "g", .count = numel, .total = numel}};
    const Algorithm* const direct = DirectExchangeOf(all, DType::kF32, world_, options_).algorithm;
    const std::vector<Chunk> chunks = direct != nullptr
                                          ? MakeWhole(*direct, all, world_).chunks
                                          : MakePartition(all, world_, options_).chunks;
    std::vector<float> result(numel);
    if (options_.momentum.beta != 0.0f && chunks[0].algorithm != &Entries()) {
      for (int r = 0; r < world_; ++r) {
        for (size_t i = 0; i < numel; ++i) {
          gradients[r][i] = options_.momentum.beta * velocities_[0][i] + gradients[r][i];
        }
      }
    }
    for (const Chunk& chunk : chunks) {
      if (chunk.algorithm == &Entries()) {
        ReduceEntries(gradients, chunk, scale, result);
        continue;
      }
      if (chunk.algorithm == &OneHop()) {
        ReduceInOneHop(gradients, chunk, scale, result);
        continue;
      }
      if (chunk.algorithm == &TwoLevel() || chunk.algorithm == &Hierarchical()) {
        for (int shard = 0; shard < world_; ++shard) {
          ReduceInTwoLevels(gradients, chunk, shard, scale, result);
        }
        continue;
      }
      for (int owner = 0; owner < world_; ++owner) {
        ReduceShard(gradients, chunk, owner, scale, result);
      }
    }
    if (options_.momentum.beta != 0.0f && chunks[0].algorithm != &Entries()) Advance(result);
    ++step_;
    return result;
  }

 private:
  // The result is the new momentum, if it is finite; with Nesterov the step is g + beta * m.
  void Advance(std::vector<float>& result) {
    const float beta = options_.momentum.beta;
    const std::vector<float> m = result;
    if (options_.momentum.nesterov) {
      for (size_t i = 0; i < m.size(); ++i) {
        const float g = -beta * velocities_[0][i] + m[i];
        result[i] = beta * m[i] + g;
      }
    }
    for (size_t i = 0; i < m.size(); ++i) {
      if (std::isfinite(m[i])) velocities_[0][i] = m[i];
    }
  }

  const CodecPair& codec() const { return options_.codecs[0]; }

  Draws DrawsOf(const CodecSpec& spec, int hop, size_t first) const {
    return {.key = HashCombine(HashCombine(spec.seed, HashBytes("g")), static_cast<uint64_t>(hop)),
            .stream = step_,
            .first = first};
  }

  void ReduceShard(std::vector<std::vector<float>>& gradients, const Chunk& chunk, int owner,
                   float scale, std::vector<float>& result) {
    const Range shard = chunk.shard(owner);
    const size_t numel = shard.end - shard.begin;
    const auto [up, down] = codec();
    const Backend& codecs = ScalarBackend();
    std::vector<uint8_t> wire(EncodedBytes(up, numel)), back(EncodedBytes(down, numel));
    std::vector<float> sum, decoded(numel);
    for (int r = 0; r < world_; ++r) {
      const TensorView own{gradients[r].data() + shard.begin, numel};
      if (r == owner) {
        decoded.assign(gradients[r].begin() + shard.begin, gradients[r].begin() + shard.end);
      } else {
        codecs.Encode(up, own, Residual(r, shard), wire.data(), DrawsOf(up, r + 1, shard.begin));
        codecs.Decode(up, wire.data(), {decoded.data(), numel});
      }
      if (sum.empty()) {
        sum = decoded;
      } else {
        for (size_t i = 0; i < numel; ++i) sum[i] += decoded[i];
      }
    }
    for (float& value : sum) value *= scale;
    codecs.Encode(down, {sum.data(), numel}, Residual(owner, shard), back.data(),
                  DrawsOf(down, 0, shard.begin));
    codecs.Decode(down, back.data(), {result.data() + shard.begin, numel});
  }

  // Reduces a shard of a column's part: over each row, then over the ranks of the column.
  void ReduceInTwoLevels(std::vector<std::vector<float>>& gradients, const Chunk& chunk, int number,
                         float scale, std::vector<float>& result) {
    const Grid grid = GridOf(chunk);
    const CodecSpec up = codec().up;
    const CodecSpec along = chunk.algorithm == &TwoLevel() ? up : LosslessSpec(DType::kF32);
    const int column = number / grid.rows, owner_row = number % grid.rows;
    const Range shard = chunk.shard(number);
    const size_t numel = shard.end - shard.begin;
    std::vector<float> sum;
    for (int row = 0; row < grid.rows; ++row) {
      std::vector<float> of_row;
      for (int c = 0; c < grid.columns; ++c) {
        const int rank = grid.rank(row, c);
        const std::vector<float>& gradient = gradients[rank];
        std::vector<float> value(gradient.begin() + shard.begin, gradient.begin() + shard.end);
        if (c != column) value = SentUp(along, rank, shard, value);
        Add(value, of_row);
      }
      if (row != owner_row) {
        of_row = SentUp(up, grid.rank(row, column), shard, of_row);
      }
      Add(of_row, sum);
    }
    for (float& value : sum) value *= scale;
    const CodecSpec& down = codec().down;
    std::vector<uint8_t> back(EncodedBytes(down, numel));
    ScalarBackend().Encode(down, {sum.data(), numel}, Residual(grid.rank(owner_row, column), shard),
                           back.data(), DrawsOf(down, 0, shard.begin));
    ScalarBackend().Decode(down, back.data(), {result.data() + shard.begin, numel});
  }

  // Returns `values` as a peer decodes them after `rank` has encoded them with its residual.
  std::vector<float> SentUp(const CodecSpec& up, int rank, Range range, std::vector<float> values) {
    std::vector<uint8_t> wire(EncodedBytes(up, values.size()));
    ScalarBackend().Encode(up, {values.data(), values.size()}, Residual(rank, range), wire.data(),
                           DrawsOf(up, rank + 1, range.begin));
    ScalarBackend().Decode(up, wire.data(), {values.data(), values.size()});
    return values;
  }

  // Starts from -0, so that adding the first values does not change a -0.
  static void Add(const std::vector<float>& values, std::vector<float>& sum) {
    if (sum.empty()) sum.assign(values.size(), -0.0f);
    for (size_t i = 0; i < values.size(); ++i) sum[i] += values[i];
  }

  void ReduceEntries(std::vector<std::vector<float>>& gradients, const Chunk& chunk, float scale,
                     std::vector<float>& result) {
    const size_t begin = chunk.elements.begin, numel = chunk.numel();
    const CodecSpec spec = codec().up.AtStep(step_);
    std::vector<std::vector<uint8_t>> shards(world_);
    std::vector<const uint8_t*> wires;
    for (int r = 0; r < world_; ++r) {
      shards[r].resize(EncodedBytes(spec, numel));
      Momentum momentum = options_.momentum;
      if (momentum.beta != 0.0f) momentum.velocity = velocities_[r].data() + begin;
      ScalarBackend().Encode(spec, {.gradient = {gradients[r].data() + begin, numel},
                                    .residual = residuals_[r].data() + begin,
                                    .wire = shards[r].data(),
                                    .momentum = momentum});
      wires.push_back(shards[r].data());
    }
    ScalarBackend().SumEntries(spec, wires, scale, {result.data() + begin, numel});
  }

  void ReduceInOneHop(std::vector<std::vector<float>>& gradients, const Chunk& chunk, float scale,
                      std::vector<float>& result) {
    const size_t begin = chunk.elements.begin, numel = chunk.numel();
    const CodecSpec& up = codec().up;
    const std::span<float> sum(result.data() + begin, numel);
    std::vector<uint8_t> wire(EncodedBytes(up, numel));
    for (int r = 0; r < world_; ++r) {
      ScalarBackend().Encode(up, {gradients[r].data() + begin, numel}, Residual(r, chunk.elements),
                             wire.data(), DrawsOf(up, r + 1, begin));
      ScalarBackend().DecodeAdd(up, wire.data(), sum);
    }
    for (float& value : sum) value *= scale;
  }

  float* Residual(int rank, Range shard) {
    return codec().uses_feedback() ? residuals_[rank].data() + shard.begin : nullptr;
  }

  const int world_;
  const Options options_;
  uint64_t step_ = 0;
  std::vector<std::vector<float>> residuals_, velocities_;  // dense codecs: only one velocity
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_SCHEDULE_REFERENCE_H_
