#include "transport/mesh/congestion.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "transport/mesh/descriptor.h"

namespace thinwire {
namespace {

bool IsSystems(const std::string& congestion) {
  return congestion.empty() || congestion == "system";
}

bool Choose(int socket, const std::string& name) {
  return setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                    static_cast<socklen_t>(name.size())) == 0;
}

}  // namespace

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
