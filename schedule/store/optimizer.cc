#include "schedule/store/optimizer.h"

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace thinwire {
namespace {

using Kind = OptimizerSpec::Kind;

struct Key {
  const char* name;
  float OptimizerSpec::*field;
  float low, high;  // the range is [low, high)
};

constexpr float kAny = std::numeric_limits<float>::max();
constexpr Key kLr{"lr", &OptimizerSpec::lr, 0.0f, kAny};
constexpr Key kRescale{"rescale", &OptimizerSpec::rescale, -kAny, kAny};
constexpr Key kWeightDecay{"weight_decay", &OptimizerSpec::weight_decay, 0.0f, kAny};
constexpr Key kMomentum{"momentum", &OptimizerSpec::momentum, 0.0f, 1.0f};
constexpr Key kBeta1{"beta1", &OptimizerSpec::beta1, 0.0f, 1.0f};
constexpr Key kBeta2{"beta2", &OptimizerSpec::beta2, 0.0f, 1.0f};
constexpr Key kEps{"eps", &OptimizerSpec::eps, 0.0f, kAny};
constexpr Key kLrDecay{"lr_decay", &OptimizerSpec::lr_decay, 0.0f, kAny};

struct Rule {
  const char* name;
  Kind kind;
  std::vector<Key> keys;
};

const std::vector<Rule>& Rules() {
  static const auto* const rules = new std::vector<Rule>{
      {"sum", Kind::kSum, {kRescale}},
      {"add", Kind::kAdd, {kLr, kRescale}},
      {"sgd", Kind::kSgd, {kLr, kRescale, kWeightDecay, kMomentum}},
      {"adam", Kind::kAdam, {kLr, kRescale, kWeightDecay, kBeta1, kBeta2, kEps}},
      {"adamw", Kind::kAdamW, {kLr, kRescale, kWeightDecay, kBeta1, kBeta2, kEps}},
      {"adagrad", Kind::kAdagrad, {kLr, kRescale, kWeightDecay, kEps, kLrDecay}}};
  return *rules;
}

std::string Keys(const Rule& rule) {
  std::string text = absl::StrJoin(rule.keys, ", ",
                                   [](std::string* out, const Key& key) { out->append(key.name); });
  if (rule.kind == Kind::kSgd) text += ", nesterov";
  return text;
}

absl::Status Set(const Rule& rule, const std::string& name, const std::string& value,
                 OptimizerSpec* spec) {
  if (rule.kind == Kind::kSgd && name == "nesterov") {
    if (value != "0" && value != "1") {
      return absl::InvalidArgumentError(
          absl::StrCat("sgd: nesterov is '", value, "', expected 0 or 1"));
    }
    spec->nesterov = value == "1";
    return absl::OkStatus();
  }
  for (const Key& key : rule.keys) {
    if (name != key.name) continue;
    float number = 0.0f;
    if (!absl::SimpleAtof(value, &number) || !(number >= key.low && number < key.high)) {
      return absl::InvalidArgumentError(
          absl::StrCat(rule.name, ": ", key.name, " is '", value, "', expected a number",
                       key.high == kAny ? (key.low < 0.0f ? "" : " from 0") : " from 0, below 1"));
    }
    spec->*key.field = number;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(rule.name, " has no '", name, "', expected ", Keys(rule)));
}

}  // namespace

absl::StatusOr<OptimizerSpec> OptimizerSpec::Parse(std::string_view text) {
  const std::vector<std::string> parts = absl::StrSplit(std::string(text), absl::MaxSplits(':', 1));
  for (const Rule& rule : Rules()) {
    if (parts[0] != rule.name) continue;
    OptimizerSpec spec{.kind = rule.kind};
    if (rule.kind == Kind::kAdagrad) spec.eps = 1e-10f;
    bool has_lr = rule.kind == Kind::kSum;
    if (parts.size() > 1) {
      const std::vector<std::string> settings = absl::StrSplit(parts[1], ',');
      for (const std::string& part : settings) {
        const std::vector<std::string> pair = absl::StrSplit(part, absl::MaxSplits('=', 1));
        const absl::Status bad = Set(rule, pair[0], pair.size() > 1 ? pair[1] : "", &spec);
        if (!bad.ok()) return bad;
        has_lr = has_lr || pair[0] == "lr";
      }
    }
    if (!has_lr) {
      return absl::InvalidArgumentError(
          absl::StrCat(rule.name, " needs a learning rate, as in ", rule.name, ":lr=0.1"));
    }
    if (spec.nesterov && spec.momentum == 0.0f) {
      return absl::InvalidArgumentError("sgd: nesterov=1 needs a momentum above 0");
    }
    return spec;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the store has no optimizer '", parts[0],
                   "', expected sum, add, sgd, adam, adamw or adagrad"));
}

size_t OptimizerSpec::slots() const {
  switch (kind) {
    case Kind::kSum:
    case Kind::kAdd: return 0;
    case Kind::kSgd: return momentum == 0.0f ? 0 : 1;
    case Kind::kAdam:
    case Kind::kAdamW: return 2;
    case Kind::kAdagrad: return 1;
  }
  return 0;
}

void OptimizerSpec::Apply(uint64_t step, std::span<float> gradient, std::span<float> x,
                          std::span<float* const> slots) const {
  const size_t n = x.size();
  float* const g = gradient.data();
  if (rescale != 1.0f) {
    for (size_t i = 0; i < n; ++i) g[i] *= rescale;
  }
  if (weight_decay != 0.0f && kind != Kind::kAdamW) {
    for (size_t i = 0; i < n; ++i) g[i] += weight_decay * x[i];
  }
  switch (kind) {
    case Kind::kSum:
      for (size_t i = 0; i < n; ++i) x[i] = g[i];
      return;
    case Kind::kAdd:
      for (size_t i = 0; i < n; ++i) x[i] += lr * g[i];
      return;
    case Kind::kSgd:
      if (momentum != 0.0f) {
        float* const velocity = slots[0];
        for (size_t i = 0; i < n; ++i) {
          velocity[i] = momentum * velocity[i] + g[i];
          g[i] = nesterov ? g[i] + momentum * velocity[i] : velocity[i];
        }
      }
      for (size_t i = 0; i < n; ++i) x[i] -= lr * g[i];
      return;
    case Kind::kAdam:
    case Kind::kAdamW: {
      const double t = static_cast<double>(step);
      const auto rate = static_cast<float>(lr / (1.0 - std::pow(double{beta1}, t)));
      const auto root = static_cast<float>(std::sqrt(1.0 - std::pow(double{beta2}, t)));
      const float keep = kind == Kind::kAdamW ? 1.0f - lr * weight_decay : 1.0f;
      float* const first = slots[0];
      float* const second = slots[1];
      for (size_t i = 0; i < n; ++i) {
        first[i] += (1.0f - beta1) * (g[i] - first[i]);
        second[i] = beta2 * second[i] + (1.0f - beta2) * g[i] * g[i];
        x[i] = keep * x[i] - rate * first[i] / (std::sqrt(second[i]) / root + eps);
      }
      return;
    }
    case Kind::kAdagrad: {
      const float rate = lr / (1.0f + static_cast<float>(step - 1) * lr_decay);
      float* const squares = slots[0];
      for (size_t i = 0; i < n; ++i) {
        squares[i] += g[i] * g[i];
        x[i] -= rate * g[i] / (std::sqrt(squares[i]) + eps);
      }
      return;
    }
  }
}

}  // namespace thinwire
