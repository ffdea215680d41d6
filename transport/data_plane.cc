#include "transport/data_plane.h"

namespace thinwire {

void Exchange::OnDone(std::function<void(absl::Status)> done) {
  done(absl::InternalError("this data plane's exchanges end by Wait only, not by OnDone"));
}

}  // namespace thinwire
