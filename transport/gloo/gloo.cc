#include "transport/gloo/gloo.h"

#include <gloo/transport/tcp/device.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "transport/gloo/gloo_links.h"
#include "transport/gloo/gloo_pair.h"
#include "transport/gloo/gloo_planes.h"
#include "transport/mesh/mesh.h"
#include "transport/mesh/tcp.h"

namespace thinwire {
namespace {

using gloo::transport::tcp::Device;

// Gloo closes every connection when one of its waits times out. Nobody waits there: what has ended
// is seen by its loop.
constexpr std::chrono::milliseconds kNoTimeout = std::chrono::hours(24 * 365);

// How long frames get to leave after a failure. A peer that has stopped takes none, and waiting for
// it must not add much to the timeout that it has cost already.
std::chrono::milliseconds PatienceFor(Clock::duration timeout) {
  using std::chrono::milliseconds;
  return std::min(milliseconds(200), std::chrono::duration_cast<milliseconds>(timeout / 30));
}

// While it lives, a write to a closed socket on this thread is an error code, not a
// signal that ends the process. Threads started meanwhile inherit that for good.
class SigpipeBlock {
 public:
  SigpipeBlock() {
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }

  // Takes back a signal that came meanwhile, unless the caller's own was waiting already.
  ~SigpipeBlock() {
    const timespec now{};
    if (!was_pending_ && sigismember(&before_, SIGPIPE) == 0) {
      while (sigtimedwait(&sigpipe_, nullptr, &now) == SIGPIPE) continue;
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

  SigpipeBlock(const SigpipeBlock&) = delete;
  SigpipeBlock& operator=(const SigpipeBlock&) = delete;

 private:
  sigset_t sigpipe_, before_;
  bool was_pending_;
};

// Gloo's device is its event loop; the address is where the sockets of its pairs would listen.
std::shared_ptr<Device> MakeDevice(const Address& address) {
  gloo::transport::tcp::attr attr;
  attr.hostname = address.Host();
  return std::dynamic_pointer_cast<Device>(gloo::transport::tcp::CreateDevice(attr));
}

}  // namespace

// Gloo gets no connection but those of ranks of the group.
absl::StatusOr<std::shared_ptr<GlooLinks>> ConnectGlooLinks(const GlooOptions& options,
                                                            absl::Status& incomplete) {
  if (absl::Status bad = CheckCongestion(options.congestion); !bad.ok()) return bad;
  const absl::StatusOr<Address> address = LocalAddress(options.interface, options.rendezvous_host);
  if (!address.ok()) return address.status();
  const SigpipeBlock no_signal;  // Gloo's own thread begins here
  try {
    const std::shared_ptr<Device> device = MakeDevice(*address);
    auto loop = std::make_unique<GlooLoop>(device);
    std::vector<Descriptor> connections;
    incomplete = ConnectMesh({.rank = options.rank,
                              .size = options.size,
                              .store = options.store,
                              .prefix = options.prefix,
                              .address = *address,
                              .key_file = options.key_file,
                              .digest = options.digest,
                              .deadline = options.deadline},
                             connections);
    absl::Status broken;
    std::shared_ptr<gloo::Context> context =
        GlooContextOf(options.rank, std::move(connections), device, *loop, kNoTimeout,
                      options.congestion, broken);
    incomplete.Update(broken);
    auto links =
        std::make_shared<GlooLinks>(std::move(context), std::move(loop),
                                    options.failure != nullptr ? options.failure : Failure::Make());
    if (!incomplete.ok()) links->failure().Fail(incomplete);
    return links;
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("rank ", options.rank, " of ", options.size,
                                               " could not connect: ", error.what()));
  }
}

absl::StatusOr<Transport> ConnectGloo(const GlooOptions& options) {
  const std::chrono::milliseconds patience = PatienceFor(options.deadline - Clock::now());
  absl::Status incomplete;
  const absl::StatusOr<std::shared_ptr<GlooLinks>> links = ConnectGlooLinks(options, incomplete);
  if (!links.ok()) return links.status();
  Transport transport = GlooPlanes(*links, patience);
  if (incomplete.ok()) return transport;
  if (options.last_words) transport.control->SendToAll(options.last_words(incomplete));
  return incomplete;
}

}  // namespace thinwire
