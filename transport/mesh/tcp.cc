#include "transport/mesh/tcp.h"

#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace thinwire {
namespace {

constexpr char kLoopback[] = "127.0.0.1";

struct FreeInfo {
  void operator()(addrinfo* info) const { freeaddrinfo(info); }
};

// Null if there is none.
std::unique_ptr<addrinfo, FreeInfo> Look(const std::string& host, int flags) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = flags;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) found = nullptr;
  return std::unique_ptr<addrinfo, FreeInfo>(found);
}

socklen_t LengthOf(int family) {
  if (family == AF_INET) return sizeof(sockaddr_in);
  return family == AF_INET6 ? sizeof(sockaddr_in6) : 0;
}

in_port_t& PortOf(Address& address) {
  return address.storage.ss_family == AF_INET6
             ? reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_port
             : reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port;
}

// Returns the first IPv4 address of the interface, else its first IPv6 address.
absl::StatusOr<Address> AddressOfInterface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return absl::UnavailableError("cannot list the network interfaces");
  std::set<std::string> names;
  Address address;
  for (const ifaddrs* it = list; it != nullptr; it = it->ifa_next) {
    names.insert(it->ifa_name);
    const socklen_t length = it->ifa_addr == nullptr ? 0 : LengthOf(it->ifa_addr->sa_family);
    if (it->ifa_name != name || length == 0) continue;
    const bool better = address.storage.ss_family == AF_INET6 && it->ifa_addr->sa_family == AF_INET;
    if (address.length != 0 && !better) continue;
    std::memcpy(&address.storage, it->ifa_addr, length);
    address.length = length;
  }
  freeifaddrs(list);
  if (address.length != 0) return address;
  return absl::InvalidArgumentError(
      names.contains(name)
          ? absl::StrCat("the network interface '", name, "' has no address; name another one")
          : absl::StrCat("there is no network interface '", name, "' here, only ",
                         absl::StrJoin(names, ", ")));
}

// A connected datagram socket has the address from which its packets leave; nothing is sent.
absl::StatusOr<Address> AddressTowards(const std::string& host) {
  const auto found = Look(host, 0);
  if (found == nullptr) return Address::Of(kLoopback, 0);
  Address towards, local;
  std::memcpy(&towards.storage, found->ai_addr, found->ai_addrlen);
  towards.length = found->ai_addrlen;
  PortOf(towards) = htons(9);
  const Descriptor socket(::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  local.length = sizeof(local.storage);
  if (!socket.valid() || connect(socket.fd(), towards.get(), towards.length) != 0 ||
      getsockname(socket.fd(), local.get(), &local.length) != 0) {
    return Address::Of(kLoopback, 0);
  }
  PortOf(local) = 0;
  return local;
}

// True for failures of accept(2) that concern only the connection, which is then gone.
bool IsOfTheConnection(int error) {
  switch (error) {
    case EAGAIN:
    case EBADF:
    case EINVAL:
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM: return false;
    default: return true;
  }
}

bool IsSystems(const std::string& congestion) {
  return congestion.empty() || congestion == "system";
}

bool Choose(int socket, const std::string& name) {
  return setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                    static_cast<socklen_t>(name.size())) == 0;
}

}  // namespace

std::string Address::Host() const {
  char text[NI_MAXHOST];
  if (getnameinfo(get(), length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return text;
}

int Address::Port() const {
  Address copy = *this;
  return ntohs(PortOf(copy));
}

absl::StatusOr<Address> Address::Of(const std::string& host, int port) {
  const auto found = Look(host, AI_NUMERICHOST);
  if (found == nullptr || port < 0 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat(host, " port ", port, " is no address"));
  }
  Address address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  PortOf(address) = htons(static_cast<uint16_t>(port));
  return address;
}

absl::StatusOr<Address> LocalAddress(const std::string& interface,
                                     const std::string& rendezvous_host) {
  if (!interface.empty()) return AddressOfInterface(interface);
  if (!rendezvous_host.empty()) return AddressTowards(rendezvous_host);
  return Address::Of(kLoopback, 0);
}

absl::StatusOr<Listener> Listener::Open(const Address& address) {
  Descriptor socket(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  Address bound;
  bound.length = sizeof(bound.storage);
  if (!socket.valid() || bind(socket.fd(), address.get(), address.length) != 0 ||
      getsockname(socket.fd(), bound.get(), &bound.length) != 0 ||
      listen(socket.fd(), SOMAXCONN) != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on a local address: ", std::strerror(errno)));
  }
  return Listener(std::move(socket), bound);
}

absl::StatusOr<Descriptor> Listener::Accept() {
  for (;;) {
    Descriptor socket(accept4(socket_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.valid() || errno == EAGAIN) return socket;
    if (!IsOfTheConnection(errno)) return absl::ResourceExhaustedError(std::strerror(errno));
  }
}

absl::Status CheckCongestion(const std::string& congestion) {
  if (IsSystems(congestion)) return absl::OkStatus();
  const Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket.valid() && Choose(socket.fd(), congestion)) return absl::OkStatus();
  std::string allowed;
  std::getline(std::ifstream("/proc/sys/net/ipv4/tcp_allowed_congestion_control"), allowed);
  return absl::InvalidArgumentError(absl::StrCat(
      "congestion is '", congestion, "', expected system, or one that the kernel lets this ",
      "process choose: ", allowed, " (net.ipv4.tcp_allowed_congestion_control)"));
}

void ChooseCongestion(int socket, const std::string& congestion) {
  if (!IsSystems(congestion)) Choose(socket, congestion);
}

}  // namespace thinwire
