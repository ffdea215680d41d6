// HopRun: the skeleton of a chunk's run, which all algorithms share: phases with a hop after each
// but the last, the tags of hops, and the undo log. An algorithm fills in Work.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_HOP_RUN_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_HOP_RUN_H_

#include <memory>
#include <span>
#include <vector>

#include "schedule/collective/algorithm.h"
#include "schedule/hash.h"

namespace thinwire {

class HopRun : public ChunkRun {
 public:
  absl::StatusOr<const Hop*> Advance() final;

 protected:
  // The scratch begins anew.
  HopRun(const ChunkJob& job, const Bench& bench);

  // Phase 0, 1, and so on. A phase that a hop follows ends in Exchange; one that does not is the
  // last.
  virtual absl::Status Work(int phase) = 0;
  // The ranges of job.residual and job.momentum.velocity that the run changes. They are saved
  // before phase 0.
  virtual std::span<const Range> Kept() const { return {&job_.chunk->elements, 1}; }

  // The next hop: send[r] goes to rank r, and recv[r] comes from it. `next`: where the hop after it
  // receives, if that may begin already.
  void Exchange(Stage made_in, Stage stage, std::span<const Bytes> send,
                std::span<const MutableBytes> recv, std::span<const MutableBytes> next = {});
  // For Exchange: these blocks, or one block for everybody.
  std::span<const Bytes> Each(std::span<const MutableBytes> blocks);
  std::span<const Bytes> ToAll(Bytes block);

  // Scratch for ReduceArgs of so many wires, or fewer of them, or fewer elements.
  std::span<float> TakeReduceScratch(size_t wires, size_t numel);

  // Hops count from 1.
  uint64_t Tag(int hop) const { return HashCombine(job_.tag, static_cast<uint64_t>(hop)); }

  const ChunkJob job_;
  const Bench bench_;
  const int n_, me_;

 private:
  std::vector<Bytes> send_;
  Hop hop_{};
  bool is_due_ = false;
  int phase_ = 0, hops_ = 0;
};

// An algorithm whose run is a `Run`, made of a job, a bench and `kArguments`.
template <typename Run, auto... kArguments>
class AlgorithmOf : public Algorithm {
 public:
  using Algorithm::Algorithm;
  std::unique_ptr<ChunkRun> Begin(const ChunkJob& job, const Bench& bench) const override {
    return std::make_unique<Run>(job, bench, kArguments...);
  }
};

// True if the codec's wire bytes are the tensor's own bytes, without the padding.
inline bool IsVerbatim(const CodecSpec& spec, DType dtype) {
  return dtype == DType::kF32 && spec == LosslessSpec(dtype);
}

inline MutableBytes BytesOf(TensorView view) {
  return {static_cast<uint8_t*>(view.data), view.bytes()};
}

inline std::vector<const uint8_t*> Pointers(std::span<const MutableBytes> blocks) {
  std::vector<const uint8_t*> pointers;
  for (const MutableBytes& block : blocks) pointers.push_back(block.data());
  return pointers;
}

// The draws of stochastic rounding of elements from `first` on, counted within their codec. `hop`:
// of the second one 0, and of the first one the sender's rank + 1, so that ranks draw
// independently.
inline Draws DrawsOf(const ChunkJob& job, const CodecSpec& spec, int hop, size_t first) {
  return {.key = HashCombine(HashCombine(spec.seed, job.tensor), static_cast<uint64_t>(hop)),
          .stream = job.step,
          .first = first};
}

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_HOP_RUN_H_
