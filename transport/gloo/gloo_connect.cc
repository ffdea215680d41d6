#include "transport/gloo/gloo_connect.h"

#include <arpa/inet.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "transport/gloo/sigpipe.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;

// Gloo's view of our store. Its keys are rank numbers; what is missing in the end is kept for the
// message, since Gloo knows exceptions only.
class StoreAdapter final : public gloo::rendezvous::Store {
 public:
  explicit StoreAdapter(const GlooOptions& options) : options_(options) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    const absl::Status status = options_.store->Set(absl::StrCat(options_.prefix, "gloo/", key),
                                                    {data.data(), data.size()});
    if (!status.ok()) throw std::runtime_error(std::string(status.message()));
  }

  std::vector<char> get(const std::string& key) override {
    const absl::StatusOr<std::string> value =
        options_.store->Get(absl::StrCat(options_.prefix, "gloo/", key), options_.deadline);
    if (!value.ok()) {
      missing_ = key;
      throw std::runtime_error(std::string(value.status().message()));
    }
    return {value->begin(), value->end()};
  }

  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) get(key);
  }

  const std::string& missing() const { return missing_; }

 private:
  const GlooOptions& options_;
  std::string missing_;
};

absl::Status CheckInterface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return absl::UnavailableError("cannot list the network interfaces");
  std::set<std::string> names;
  for (const ifaddrs* it = list; it != nullptr; it = it->ifa_next) names.insert(it->ifa_name);
  freeifaddrs(list);
  if (names.contains(name)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("there is no network interface '", name,
                                                 "' here, only ", absl::StrJoin(names, ", ")));
}

// The local address from which packets to `host` leave: a connected datagram socket has it, and
// nothing is sent.
std::string AddressTowards(const std::string& host) {
  constexpr char kLoopback[] = "127.0.0.1";
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (host.empty() || getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return kLoopback;
  std::string address = kLoopback;
  const int socket = ::socket(found->ai_family, SOCK_DGRAM, 0);
  sockaddr_storage local{};
  socklen_t length = sizeof(local);
  char text[NI_MAXHOST];
  if (socket >= 0 && connect(socket, found->ai_addr, found->ai_addrlen) == 0 &&
      getsockname(socket, reinterpret_cast<sockaddr*>(&local), &length) == 0 &&
      getnameinfo(reinterpret_cast<sockaddr*>(&local), length, text, sizeof(text), nullptr, 0,
                  NI_NUMERICHOST) == 0) {
    address = text;
  }
  if (socket >= 0) close(socket);
  freeaddrinfo(found);
  return address;
}

}  // namespace

absl::StatusOr<std::shared_ptr<gloo::Context>> ConnectFullMesh(const GlooOptions& options) {
  gloo::transport::tcp::attr attr;
  if (options.interface.empty()) {
    attr.hostname = AddressTowards(options.rendezvous_host);
  } else {
    if (absl::Status bad = CheckInterface(options.interface); !bad.ok()) return bad;
    attr.iface = options.interface;
  }
  StoreAdapter store(options);
  const SigpipeBlock no_signal;  // Gloo's own thread begins here
  try {
    std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(attr);
    auto context = std::make_shared<gloo::rendezvous::Context>(options.rank, options.size);
    const auto left = std::chrono::duration_cast<milliseconds>(options.deadline - Clock::now());
    context->setTimeout(std::max(left, milliseconds(1)));
    context->connectFullMesh(store, device);
    return context;
  } catch (const std::exception& error) {
    const std::string who =
        store.missing().empty() ? "" : absl::StrCat("rank ", store.missing(), " did not come; ");
    const std::string text = absl::StrCat("rank ", options.rank, " of ", options.size,
                                          " could not connect: ", who, error.what());
    if (Clock::now() >= options.deadline || !store.missing().empty())
      return absl::DeadlineExceededError(text);
    return absl::UnavailableError(text);
  }
}

}  // namespace thinwire
