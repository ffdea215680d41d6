// Gloo over TCP: point-to-point messages on unbound buffers between all pairs of ranks. Its data
// plane matches by tag, blocks, and works on host memory.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/store.h"
#include "transport/transport.h"

namespace thinwire {

struct GlooOptions {
  int rank = 0;
  int size = 1;
  std::shared_ptr<Store> store;
  std::string prefix;  // before every key in the store, so that groups can share one
  // Which address to listen on: the named interface; else the address of the interface by which
  // `rendezvous_host` is reached; else loopback. Never a wildcard.
  std::string interface;
  std::string rendezvous_host;
  Deadline deadline;  // for the whole connecting
};

// DeadlineExceeded names the ranks that did not come; InvalidArgument an interface that is not
// there.
absl::StatusOr<Transport> ConnectGloo(const GlooOptions& options);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_H_
