// GlooPair: Gloo's end of a connection that we made and checked, in place of one that Gloo makes.
//
// Gloo's own pair listens on a port from its constructor on, and takes the first connection that
// comes for its peer's; a stranger's bytes then abort the process. It offers no way to hand it a
// connection, but what it needs is protected, and so open to a derived class.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_PAIR_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_PAIR_H_

#include <gloo/context.h>
#include <gloo/transport/tcp/device.h>

#include <chrono>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/gloo/gloo_loop.h"
#include "transport/mesh/descriptor.h"

namespace thinwire {

// A context of Gloo over connections with each other rank, by rank, of which it takes possession.
// `loop` is the device's. Unavailable if a connection broke meanwhile.
absl::StatusOr<std::shared_ptr<gloo::Context>> GlooContextOf(
    int rank, std::vector<Descriptor> connections,
    std::shared_ptr<gloo::transport::tcp::Device> device, GlooLoop& loop,
    std::chrono::milliseconds timeout);

// Whether bytes that were sent to that rank are still on their way. They are lost if the connection
// closes now, since Gloo resets it.
bool IsOnItsWay(gloo::Context& context, int peer);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_PAIR_H_
