// Backend::Reduce of the CPU: one rank's stage after the other, but where a codec has a loop of its
// own for it.
#ifndef THINWIRE_COMPRESS_CPU_REDUCE_H_
#define THINWIRE_COMPRESS_CPU_REDUCE_H_

#include <cstddef>

#include "absl/container/inlined_vector.h"
#include "compress/backend.h"
#include "compress/codec_info.h"
#include "compress/piece.h"

namespace thinwire {

// One reduction, of at least one element; `args` outlive it.
class CpuReduction {
 public:
  explicit CpuReduction(const ReduceArgs& args);

  void Run();

 private:
  // Ranks whose walks need no memory of their own.
  static constexpr size_t kRanks = 64;

  void BeginWalks();
  void ReduceAll();
  void ReduceWidths();
  void ReducePiece(const Piece& up, const Piece& down, const float* own, float* out);
  void ReduceStage(const Piece& up, const Piece& down, const float* own, float* out);
  void Sum(const Piece& up, const float* own, float* sum);
  void SumOfTensor(size_t begin, size_t count, float* sum);
  float* ResidualAt(size_t begin) const;

  const ReduceArgs& args_;
  const TensorView own_;  // the result's memory, never read, where the reducer has no shard
  const Shard up_, down_;
  const DenseOperations &from_, &to_;
  const bool direct_;                        // the tensors are fp32
  absl::InlinedVector<Walk, kRanks> walks_;  // over each rank's wire, of kWidths
};

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CPU_REDUCE_H_
