// How Gloo's connections come about: addresses, the store, the deadline.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_CONNECT_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_CONNECT_H_

#include <gloo/context.h>

#include <memory>

#include "absl/status/statusor.h"
#include "transport/gloo/gloo.h"

namespace thinwire {

// A full mesh. Nothing listens on a wildcard address.
absl::StatusOr<std::shared_ptr<gloo::Context>> ConnectFullMesh(const GlooOptions& options);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_CONNECT_H_
