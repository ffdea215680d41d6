// Replaces the files that need UCX's headers in builds without them.
#include "transport/ucx/ucx.h"

namespace thinwire {
namespace {

absl::Status NotBuilt() {
  return absl::UnimplementedError(
      "this build of thinwire has no UCX: install libucx-dev and build again, or set transport to "
      "gloo");
}

}  // namespace

absl::StatusOr<std::string> UcxVersion(const std::string&) { return NotBuilt(); }

absl::StatusOr<std::unique_ptr<DataPlane>> ConnectUcx(const UcxOptions&) { return NotBuilt(); }

}  // namespace thinwire
