#include "transport/mesh/congestion.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "transport/mesh/descriptor.h"

namespace thinwire {
namespace {

constexpr std::string_view kPaced = "bbr", kClockedByAcks = "reno";
// The round trip below which ranks are near. The engine's order calls as near what takes half of it
// one way (Options::far).
constexpr uint32_t kNearMicroseconds = 2000;
// Reno is no slower at 10 Gb/s, and slower at 1 Gb/s.
constexpr uint64_t kSlowBytesPerSecond = 2'000'000'000 / 8;
// Less than this under way is a burst that buffers take, and says nothing about the link.
constexpr uint64_t kQueueBytes = 256 << 10;

bool Choose(int socket, std::string_view name) {
  return setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                    static_cast<socklen_t>(name.size())) == 0;
}

// Zeros where the kernel does not say all that is asked for here.
tcp_info InfoOf(int socket) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  constexpr size_t kTold = offsetof(tcp_info, tcpi_delivery_rate) + sizeof(info.tcpi_delivery_rate);
  const bool is_told =
      getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && size >= kTold;
  return is_told ? info : tcp_info{};
}

// By the shortest round trip that the kernel has seen, that of the connecting included. Their mean
// would count what a peer takes to answer.
bool IsNear(int socket) {
  const uint32_t shortest = InfoOf(socket).tcpi_min_rtt;
  return shortest > 0 && shortest < kNearMicroseconds;
}

uint64_t BytesUnderWay(const tcp_info& info) {
  return uint64_t{info.tcpi_unacked} * info.tcpi_snd_mss;
}

bool IsAuto(const std::string& congestion) { return congestion.empty() || congestion == "auto"; }

}  // namespace

absl::Status CheckCongestion(const std::string& congestion) {
  if (IsAuto(congestion) || congestion == "system") return absl::OkStatus();
  const Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket.valid() && Choose(socket.fd(), congestion)) return absl::OkStatus();
  std::string allowed;
  std::getline(std::ifstream("/proc/sys/net/ipv4/tcp_allowed_congestion_control"), allowed);
  return absl::InvalidArgumentError(absl::StrCat(
      "congestion is '", congestion, "', expected auto, system, or one that the kernel ",
      "lets this process choose: ", allowed, " (net.ipv4.tcp_allowed_congestion_control)"));
}

std::string CongestionOf(int socket) {
  std::array<char, 16> name{};  // the kernel's TCP_CA_NAME_MAX
  socklen_t size = name.size();
  if (getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) != 0) return "";
  return {name.data(), strnlen(name.data(), size)};
}

bool IsBehindAQueue(const tcp_info& info) {
  return BytesUnderWay(info) >= kQueueBytes && info.tcpi_rtt >= kNearMicroseconds &&
         info.tcpi_delivery_rate_app_limited == 0 && info.tcpi_delivery_rate < kSlowBytesPerSecond;
}

Congestion::Congestion(int socket, const std::string& congestion) : socket_(socket) {
  if (congestion == "system") return;
  if (!IsAuto(congestion)) {
    Choose(socket, congestion);
  } else if (CongestionOf(socket) == kPaced && IsNear(socket)) {
    replaced_ = Choose(socket, kClockedByAcks);
  }
}

void Congestion::Look() {
  const tcp_info info = InfoOf(socket_);
  if (BytesUnderWay(info) < kQueueBytes) return;
  queued_ = IsBehindAQueue(info) ? queued_ + 1 : 0;
  if (queued_ == kConvinced) replaced_ = !Choose(socket_, kPaced);
}

}  // namespace thinwire
