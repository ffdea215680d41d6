#include "schedule/store/frames.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace thinwire {

static_assert(std::endian::native == std::endian::little, "heads are little-endian");
static_assert(sizeof(StoreHead) == 32, "heads have no padding");

const char* Name(Together what) {
  switch (what) {
    case Together::kInit: return "init";
    case Together::kOptimizer: return "set_optimizer";
    case Together::kBarrier: return "barrier";
    case Together::kLoad: return "load";
  }
  return "call";
}

std::string StoreHead::ToBytes() const {
  return std::string(reinterpret_cast<const char*>(this), sizeof(*this));
}

absl::StatusOr<StoreHead> StoreHead::Parse(std::string_view bytes) {
  if (bytes.size() != sizeof(StoreHead)) {
    return absl::InvalidArgumentError(absl::StrCat("a message's head has ", bytes.size(),
                                                   " bytes, expected ", sizeof(StoreHead)));
  }
  StoreHead head;
  std::memcpy(static_cast<void*>(&head), bytes.data(), sizeof(head));
  if (head.kind > Kind::kError || head.form > Form::kRows || head.reserved != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a message has kind ", static_cast<int>(head.kind), ", form ", static_cast<int>(head.form),
        ", expected kinds to ", static_cast<int>(Kind::kError), " and forms to ",
        static_cast<int>(Form::kRows)));
  }
  return head;
}

absl::Status CheckWeight(double weight) {
  if (std::isfinite(weight) && weight > 0.0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "its weight is ", weight, ", expected a finite number above 0; give the samples or tokens ",
      "that the gradient is of, and push nothing where there are none"));
}

void AppendWeight(double weight, std::vector<uint8_t>* body) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(&weight);
  body->insert(body->end(), bytes, bytes + sizeof(weight));
}

absl::StatusOr<double> TakeWeight(Bytes* body) {
  double weight = 0.0;
  if (body->size() < sizeof(weight)) {
    return absl::InvalidArgumentError(
        absl::StrCat("it has ", body->size(), " bytes, expected ", sizeof(weight), " of a weight"));
  }
  std::memcpy(&weight, body->data() + body->size() - sizeof(weight), sizeof(weight));
  if (absl::Status bad = CheckWeight(weight); !bad.ok()) return bad;
  *body = body->first(body->size() - sizeof(weight));
  return weight;
}

}  // namespace thinwire
