#include "schedule/options.h"

#include "absl/strings/str_cat.h"
#include "compress/element_limit.h"

namespace thinwire {

absl::Status CheckOptions(const Options& options) {
  if (options.lanes < 1 || options.lanes > 64) {
    return absl::InvalidArgumentError(
        absl::StrCat("lanes is ", options.lanes, ", expected 1 to 64"));
  }
  constexpr size_t kLeast = 4096, kMost = kMostElements * sizeof(float);
  if (options.chunk_bytes < kLeast || options.chunk_bytes > kMost) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk_bytes is ", options.chunk_bytes, ", expected ", kLeast, " to ", kMost));
  }
  if (options.loops < 1 || options.loops > 16) {
    return absl::InvalidArgumentError(
        absl::StrCat("loops is ", options.loops, ", expected 1 to 16"));
  }
  if (options.codecs.empty()) return absl::InvalidArgumentError("there must be a codec");
  if (!(options.momentum.beta >= 0.0f && options.momentum.beta < 1.0f)) {
    return absl::InvalidArgumentError(
        absl::StrCat("momentum is ", options.momentum.beta, ", expected 0 to below 1"));
  }
  if (options.timeout <= std::chrono::milliseconds(0)) {
    return absl::InvalidArgumentError("the timeout must be longer than nothing");
  }
  return absl::OkStatus();
}

}  // namespace thinwire
