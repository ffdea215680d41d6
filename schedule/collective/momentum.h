// Momentum that the engine owns, where feedback on the bare gradient would diverge. The engine
// reduces m_own = beta * m + g, with m the last decoded result, equal on all ranks; the decoded
// mean is the new m, and what the optimizer applies. Tang et al., "1-bit Adam", arXiv 2102.02888,
// section 4, algorithm 1. Nesterov as torch.optim.SGD.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_MOMENTUM_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_MOMENTUM_H_

#include "compress/backend.h"
#include "schedule/options.h"

namespace thinwire {

// One tensor's step, around its allreduce, which makes the new m of m_own. The velocity holds the
// last m meanwhile: where the new one is not finite, because a rank's
// gradient was not, the last one stays. All ranks decode the same m, so all decide alike.
class MomentumStep {
 public:
  // The momentum's velocity and `reduced` have a float for each element; the latter stays untouched
  // until After.
  MomentumStep(const Momentum& momentum, std::span<float> reduced)
      : momentum_(momentum), reduced_(reduced) {}

  // The allreduce takes m_own from here, after Before. It may leave the new m there.
  std::span<float> reduced() const { return reduced_; }

  // Elements [offset, offset + gradient.numel) of the tensor.
  void Before(const Arithmetic& arithmetic, TensorView gradient, size_t offset);
  // In place of Before, where the allreduce only encodes the elements from `offset` on: one pass
  // over them less, on a device.
  void InEncoding(size_t offset, EncodeArgs* encoding) const {
    encoding->momentum = momentum_.From(offset);
  }
  // `m`: the new m of elements [offset, offset + m.numel), which may lie in `output` already.
  void After(const Arithmetic& arithmetic, TensorView m, TensorView output, size_t offset);

 private:
  const Momentum momentum_;
  const std::span<float> reduced_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_MOMENTUM_H_
