// Operands: a chunk's elements, contiguous, with what is kept of them between steps.
//
// They are the bucket's own memory where a chunk lies there in one piece, a copy where it does not,
// and the momentum's where the engine owns one. A result that is the new momentum still goes to the
// bucket at once, where a chunk is one piece.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_OPERANDS_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_OPERANDS_H_

#include <span>
#include <vector>

#include "compress/backend.h"
#include "compress/error_feedback.h"
#include "schedule/collective/algorithm.h"

namespace thinwire {

// The parts of `ranges` that lie in `within`, and not in `without`; counted from within.begin.
std::vector<Range> Overlap(std::span<const Range> ranges, Range within, Range without);

// The engine owns the momentum of codecs whose feedback on the bare gradient would diverge: it
// reduces m_own = beta * m + g, with m the last decoded result, equal on all ranks; the decoded
// mean is the new m, and what the optimizer applies. Tang et al., "1-bit Adam", arXiv 2102.02888,
// section 4, algorithm 1. Nesterov as torch.optim.SGD. Where the new m is not finite, because a
// rank's gradient was not, the last one stays. All ranks decode the same m, so all decide alike.
//
// Parameters that this rank has no gradient for in this step count as zeros, and their residuals
// wait for a step that has a gradient: sent now they would be lost where nobody uses the mean, as
// for a parameter that no rank has a gradient for. The codec sees nothing of these residuals, and
// its own loss (onebit has no zero) is added to them afterwards, so that the bookkeeping stays
// exact.
class Operands {
 public:
  // `job` and the bench outlive it.
  Operands(const ChunkJob& job, const Bench& bench);
  ~Operands() { RestoreAbsent(); }
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
  void SetAbsentAside();  // before the encoding
  // Undoes SetAbsentAside; without one, or a second time, it does nothing.
  void RestoreAbsent();
  void EndMomentum(TensorView m, TensorView output, size_t offset);
  // One piece of the bucket needs no copy.
  bool is_whole() const { return job_.chunk->pieces.size() == 1; }
  bool adds_momentum() const { return momentum_.velocity != nullptr; }

  const ChunkJob& job_;
  const Bench& bench_;
  const size_t numel_;
  TensorView input_, output_;
  float* residual_ = nullptr;
  Range loaded_;
  bool copies_ = false;
  Momentum momentum_;  // of this chunk; its velocity holds the last m until Store. Null: none
  std::span<float> with_momentum_;  // m_own, and where the chunk may leave the new m
  struct Absent {
    std::span<float> kept, aside;
  };
  std::vector<Absent> absent_;  // ranges of what is kept, which take no part
  bool is_aside_ = false;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_OPERANDS_H_
