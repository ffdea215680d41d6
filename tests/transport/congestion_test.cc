// The congestion control of connections, as the kernel reports it.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <string>

#include "transport/mesh/descriptor.h"
#include "transport/mesh/tcp.h"

namespace thinwire {
namespace {

std::string CongestionOf(int socket) {
  char name[16] = {};  // the kernel's TCP_CA_NAME_MAX
  socklen_t size = sizeof(name);
  EXPECT_EQ(getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, &size), 0);
  return name;
}

// Returns the congestion control of a new socket after it was set to `congestion`.
std::string After(const std::string& congestion) {
  const Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ChooseCongestion(socket.fd(), congestion);
  return CongestionOf(socket.fd());
}

TEST(Congestion, ANameIsChosen) { EXPECT_EQ(After("reno"), "reno"); }

TEST(Congestion, TheSystemsChoiceIsTheDefault) {
  const Descriptor untouched(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(After(""), CongestionOf(untouched.fd()));
  EXPECT_EQ(After("system"), CongestionOf(untouched.fd()));
}

TEST(Congestion, WhatMayNotBeChosenIsRefusedWithWhatMay) {
  EXPECT_TRUE(CheckCongestion("").ok());
  EXPECT_TRUE(CheckCongestion("system").ok());
  EXPECT_TRUE(CheckCongestion("reno").ok());
  for (const std::string name : {"no-such-control", "auto"}) {
    const absl::Status bad = CheckCongestion(name);
    EXPECT_TRUE(absl::IsInvalidArgument(bad)) << bad;
    EXPECT_NE(bad.message().find("'" + name + "'"), std::string::npos) << bad;
    EXPECT_NE(bad.message().find("reno"), std::string::npos) << bad;
  }
}

TEST(Congestion, ALongNameIsRefusedToo) {
  EXPECT_TRUE(absl::IsInvalidArgument(CheckCongestion(std::string(300, 'a'))));
}

}  // namespace
}  // namespace thinwire
