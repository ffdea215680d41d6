// Gloo over TCP: point-to-point messages on unbound buffers between all pairs of ranks. Its data
// plane matches by tag, blocks, and works on host memory.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/planes.h"
#include "transport/store.h"

namespace thinwire {

class GlooLinks;

struct GlooOptions {
  int rank = 0;
  int size = 1;
  std::shared_ptr<Store> store;
  std::string prefix;  // of every key in the store, so that groups can share one
  // The address to listen on: that of the named interface; else that of the interface by which
  // `rendezvous_host` is reached; else loopback. Never a wildcard.
  std::string interface;
  std::string rendezvous_host;
  Deadline deadline;  // for connecting to all ranks
  // A file of mode 0600 with the group's key, which every rank has. Empty on all ranks: rank 0 puts
  // a random token into the store, so that only processes that can read the store can take part.
  std::string key_file;
  std::string digest;           // text that is equal on all ranks whose settings are the same
  std::string congestion = {};  // of the connections: see CheckCongestion
  // The frame that the connected ranks get when this one gives up because others are not connected:
  // otherwise they would find a closed connection, and take this rank for the one that failed.
  std::function<ControlFrame(const absl::Status& reason)> last_words = nullptr;
};

// Every connection proves that it belongs to this group before Gloo gets it, and nothing listens
// any more when this returns. DeadlineExceeded names the ranks that did not come or connect;
// InvalidArgument names an interface that does not exist, a defect of the key file, or a congestion
// control that may not be chosen; FailedPrecondition names a rank whose key or digest differs.
absl::StatusOr<Transport> ConnectGloo(const GlooOptions& options);

// The halves of ConnectGloo: the control plane, and the data plane over it, which must not outlive
// it. If the group is incomplete, the control plane reaches the connected ranks and starts in the
// failed state; `incomplete` is the reason. last_words: as for GlooLinks.
absl::StatusOr<std::unique_ptr<GlooLinks>> ConnectGlooLinks(const GlooOptions& options,
                                                            std::chrono::milliseconds last_words,
                                                            absl::Status& incomplete);
std::unique_ptr<DataPlane> GlooDataOver(GlooLinks& links);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_H_
