// Operands: a chunk's elements, contiguous. They are the bucket's own memory where a chunk lies
// there in one piece, a copy where it does not, and the momentum's where the engine owns one. A
// result that is the new momentum still goes to the bucket at once, where a chunk is one piece.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_OPERANDS_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_OPERANDS_H_

#include <optional>

#include "schedule/collective/absence.h"
#include "schedule/collective/algorithm.h"
#include "schedule/collective/momentum.h"

namespace thinwire {

class Operands {
 public:
  // `job` and the bench outlive it.
  Operands(const ChunkJob& job, const Bench& bench);
  ~Operands() { absence_.Restore(bench_.backend); }
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;

  // Valid after Load, except outside of `needed` where momentum is fused into the encoding: there
  // Encoding says what to encode.
  TensorView input() const { return input_; }
  TensorView output() const { return output_; }
  float* residual() const { return residual_; }

  // Brings the elements together; residuals of what this rank has no gradient for step aside. All
  // elements outside of `needed`, which counts from the chunk's begin, are only encoded, from what
  // Encoding returns.
  void Load(Range needed);
  void Load() { Load({0, numel_}); }
  // For EncodeAll: elements, counted from the chunk's begin, their residuals and their momentum.
  EncodeArgs Encoding(Range elements) const;
  // Puts the results where they belong, and those residuals back.
  void Store();

 private:
  template <typename Visit>
  void ForEachPiece(const TensorView& bucket, Visit visit);
  void FindAbsent();
  // One piece of the bucket needs no copy.
  bool is_whole() const { return job_.chunk->pieces.size() == 1; }

  const ChunkJob& job_;
  const Bench& bench_;
  const size_t numel_;
  TensorView input_, output_;
  float* residual_ = nullptr;
  Range loaded_;
  bool copies_ = false;
  std::optional<MomentumStep> momentum_;
  Absence absence_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_OPERANDS_H_
