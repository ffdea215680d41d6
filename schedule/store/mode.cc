#include "schedule/store/mode.h"

#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace thinwire {
namespace {

constexpr std::string_view kStaleness = "ssp:staleness=";
constexpr int kMaxStaleness = 1'000'000;
constexpr std::string_view kQuorum = "sync:quorum=";
constexpr std::string_view kGrace = ",grace=";
constexpr double kMaxGrace = 3600.0;

bool ParseQuorum(std::string_view text, StoreMode* mode) {
  if (!text.starts_with(kQuorum)) return false;
  text.remove_prefix(kQuorum.size());
  const size_t comma = text.find(kGrace);
  if (comma == std::string_view::npos) return false;
  const std::string grace(text.substr(comma + kGrace.size()));
  double seconds = 0.0;
  if (!absl::SimpleAtoi(std::string(text.substr(0, comma)), &mode->quorum) ||
      !absl::SimpleAtod(grace, &seconds) || mode->quorum < 1 || mode->quorum > kMaxStoreWorkers ||
      !(seconds >= 0.0 && seconds <= kMaxGrace)) {
    return false;
  }
  mode->kind = StoreMode::Kind::kQuorum;
  mode->grace = std::chrono::milliseconds(std::llround(seconds * 1000.0));
  return true;
}

}  // namespace

absl::StatusOr<StoreMode> StoreMode::Parse(std::string_view text) {
  if (text == "sync") return StoreMode{};
  if (text == "async") return StoreMode{.kind = Kind::kAsync};
  if (StoreMode mode; ParseQuorum(text, &mode)) return mode;
  StoreMode mode{.kind = Kind::kSsp};
  if (text.substr(0, kStaleness.size()) == kStaleness) {
    const std::string number(text.substr(kStaleness.size()));
    if (absl::SimpleAtoi(number, &mode.staleness) && mode.staleness >= 1 &&
        mode.staleness <= kMaxStaleness) {
      return mode;
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "the store's mode is '", std::string(text), "', expected sync, async, ssp:staleness=k with ",
      "k from 1 to ", kMaxStaleness, ", or sync:quorum=k,grace=s with k workers from 1 and s ",
      "seconds from 0 to ", kMaxGrace));
}

std::string StoreMode::ToString() const {
  switch (kind) {
    case Kind::kSync: return "sync";
    case Kind::kAsync: return "async";
    case Kind::kSsp: return absl::StrCat("ssp:staleness=", staleness);
    case Kind::kQuorum:
      return absl::StrFormat("%s%d%s%.7g", kQuorum, quorum, kGrace,
                             std::chrono::duration<double>(grace).count());
  }
  return "unknown mode";
}

}  // namespace thinwire
