#include "transport/mesh/congestion.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

constexpr std::string_view kPaced = "bbr", kClockedByAcks = "reno";
// The round trip below which ranks are near. The engine's order calls as near what takes half of it
// one way (Options::far).
constexpr uint32_t kNearMicroseconds = 2000;

bool Choose(const Descriptor& connection, std::string_view name) {
  return setsockopt(connection.fd(), IPPROTO_TCP, TCP_CONGESTION, name.data(),
                    static_cast<socklen_t>(name.size())) == 0;
}

// The shortest that the kernel has seen, that of the connecting included. Its mean would count what
// a peer takes to answer.
bool IsNear(const Descriptor& connection) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(connection.fd(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  const bool is_told = size >= offsetof(tcp_info, tcpi_min_rtt) + sizeof(info.tcpi_min_rtt);
  return is_told && info.tcpi_min_rtt < kNearMicroseconds;
}

bool IsAuto(const std::string& congestion) { return congestion.empty() || congestion == "auto"; }

}  // namespace

absl::Status CheckCongestion(const std::string& congestion) {
  if (IsAuto(congestion) || congestion == "system") return absl::OkStatus();
  const Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket.valid() && Choose(socket, congestion)) return absl::OkStatus();
  std::string allowed;
  std::getline(std::ifstream("/proc/sys/net/ipv4/tcp_allowed_congestion_control"), allowed);
  return absl::InvalidArgumentError(absl::StrCat(
      "congestion is '", congestion, "', expected auto, system, or one that the kernel ",
      "lets this process choose: ", allowed, " (net.ipv4.tcp_allowed_congestion_control)"));
}

void SetCongestion(const Descriptor& connection, const std::string& congestion) {
  if (congestion == "system") return;
  if (!IsAuto(congestion)) {
    Choose(connection, congestion);
  } else if (CongestionOf(connection) == kPaced && IsNear(connection)) {
    Choose(connection, kClockedByAcks);
  }
}

std::string CongestionOf(const Descriptor& connection) {
  std::array<char, 16> name{};  // the kernel's TCP_CA_NAME_MAX
  socklen_t size = name.size();
  if (getsockopt(connection.fd(), IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) != 0) return "";
  return {name.data(), strnlen(name.data(), size)};
}

}  // namespace thinwire
