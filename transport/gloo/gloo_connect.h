// How Gloo's connections come about: where to listen, checked connections, and Gloo's objects.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_CONNECT_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_CONNECT_H_

#include <gloo/context.h>

#include <memory>

#include "absl/status/statusor.h"
#include "transport/gloo/gloo.h"
#include "transport/gloo/gloo_loop.h"

namespace thinwire {

struct GlooMesh {
  std::shared_ptr<gloo::Context> context;
  std::unique_ptr<GlooLoop> loop;
  absl::Status incomplete;  // why some rank is not connected; OK: all are
};

// Gloo gets no connection but those of ranks of the group.
absl::StatusOr<GlooMesh> ConnectGlooMesh(const GlooOptions& options);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_CONNECT_H_
