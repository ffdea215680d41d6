#include "transport/gloo/gloo_connect.h"

#include <gloo/transport/tcp/device.h>

#include <chrono>
#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "transport/gloo/gloo_pair.h"
#include "transport/gloo/sigpipe.h"
#include "transport/mesh/address.h"
#include "transport/mesh/congestion.h"
#include "transport/mesh/mesh.h"

namespace thinwire {
namespace {

using gloo::transport::tcp::Device;

// Gloo closes every connection when one of its waits times out. Nobody waits there: what has ended
// is seen by its loop.
constexpr std::chrono::milliseconds kNoTimeout = std::chrono::hours(24 * 365);

// Gloo's device is its event loop; the address is where the sockets of its pairs would listen.
std::shared_ptr<Device> MakeDevice(const Address& address) {
  gloo::transport::tcp::attr attr;
  attr.hostname = address.Host();
  return std::dynamic_pointer_cast<Device>(gloo::transport::tcp::CreateDevice(attr));
}

}  // namespace

absl::StatusOr<GlooMesh> ConnectGlooMesh(const GlooOptions& options) {
  if (absl::Status bad = CheckCongestion(options.congestion); !bad.ok()) return bad;
  const absl::StatusOr<Address> address = LocalAddress(options.interface, options.rendezvous_host);
  if (!address.ok()) return address.status();
  const SigpipeBlock no_signal;  // Gloo's own thread begins here
  try {
    const std::shared_ptr<Device> device = MakeDevice(*address);
    auto loop = std::make_unique<GlooLoop>(device);
    std::vector<Descriptor> connections;
    absl::Status incomplete = ConnectMesh({.rank = options.rank,
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
    return GlooMesh{std::move(context), std::move(loop), std::move(incomplete)};
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("rank ", options.rank, " of ", options.size,
                                               " could not connect: ", error.what()));
  }
}

}  // namespace thinwire
