// OptimizerSpec: how a server applies an update, by name and numbers. No code is sent.
//
//   sum      x = g. What a pull returns is the sum of a step's pushes (MXNet without an optimizer).
//            In sync only.
//   add      x += lr * g. Keys are counters, or workers push changes of weights.
//   sgd, adam, adamw, adagrad   as torch.optim's of the same name and settings, in fp32.
//
// g is `rescale` times the sum of the workers' pushes in sync, their weighted mean with a quorum,
// one push otherwise.
#ifndef THINWIRE_SCHEDULE_STORE_OPTIMIZER_H_
#define THINWIRE_SCHEDULE_STORE_OPTIMIZER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace thinwire {

struct OptimizerSpec {
  enum class Kind { kSum, kAdd, kSgd, kAdam, kAdamW, kAdagrad };

  Kind kind = Kind::kSum;
  float lr = 0.0f;  // required, except for sum
  float rescale = 1.0f;
  float weight_decay = 0.0f;
  float momentum = 0.0f;  // sgd
  bool nesterov = false;  // sgd, with a momentum
  float beta1 = 0.9f, beta2 = 0.999f;
  float eps = 1e-8f;      // adam, adamw; adagrad 1e-10
  float lr_decay = 0.0f;  // adagrad

  // Parses "sgd:lr=0.1,momentum=0.9". InvalidArgument for an unknown name or key, a value out of
  // range, or a missing lr.
  static absl::StatusOr<OptimizerSpec> Parse(std::string_view text);

  // Number of extra arrays as long as the values: momentum; first and second moments; squares.
  size_t slots() const;

  // Applies update number `step` (from 1) to x. Slots are zeros before the first update. All spans
  // of floats have the same size. Overwrites `gradient`.
  void Apply(uint64_t step, std::span<float> gradient, std::span<float> x,
             std::span<float* const> slots) const;

  friend bool operator==(const OptimizerSpec&, const OptimizerSpec&) = default;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_OPTIMIZER_H_
