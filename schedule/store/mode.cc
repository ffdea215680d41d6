#include "schedule/store/mode.h"

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

constexpr std::string_view kStaleness = "ssp:staleness=";
constexpr int kMaxStaleness = 1'000'000;

}  // namespace

absl::StatusOr<StoreMode> StoreMode::Parse(std::string_view text) {
  if (text == "sync") return StoreMode{};
  if (text == "async") return StoreMode{.kind = Kind::kAsync};
  StoreMode mode{.kind = Kind::kSsp};
  if (text.substr(0, kStaleness.size()) == kStaleness) {
    const std::string number(text.substr(kStaleness.size()));
    if (absl::SimpleAtoi(number, &mode.staleness) && mode.staleness >= 1 &&
        mode.staleness <= kMaxStaleness) {
      return mode;
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the store's mode is '", std::string(text),
                   "', expected sync, async, or ssp:staleness=k with k from 1 to ", kMaxStaleness));
}

std::string StoreMode::ToString() const {
  switch (kind) {
    case Kind::kSync: return "sync";
    case Kind::kAsync: return "async";
    case Kind::kSsp: return absl::StrCat("ssp:staleness=", staleness);
  }
  return "unknown mode";
}

}  // namespace thinwire
