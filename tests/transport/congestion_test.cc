// Which congestion control connections run, as the kernel says.
#include "transport/mesh/congestion.h"

#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <utility>

#include "transport/mesh/address.h"
#include "transport/mesh/listener.h"

namespace thinwire {
namespace {

// One end of a connection over loopback, and what keeps it open.
struct Connection {
  Connection() : listener(*Listener::Open(*LocalAddress("", ""))) {
    const Address to = listener.address();
    client = Descriptor(::socket(to.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(client.fd(), to.get(), to.length), 0);
    absl::StatusOr<Descriptor> accepted = listener.Accept();
    if (accepted.ok()) server = *std::move(accepted);
  }
  // False where the kernel lacks it, or does not let this process choose it.
  bool Runs(const std::string& name) const {
    return setsockopt(client.fd(), IPPROTO_TCP, TCP_CONGESTION, name.data(), name.size()) == 0;
  }

  Listener listener;
  Descriptor client, server;
};

TEST(Congestion, NearRanksAreNotPacedByTimers) {
  const Connection connection;
  if (!connection.Runs("bbr")) GTEST_SKIP() << "this kernel lets nobody here choose BBR";
  SetCongestion(connection.client, "auto");
  EXPECT_EQ(CongestionOf(connection.client), "reno");
}

TEST(Congestion, AnEmptyNameIsAuto) {
  const Connection connection;
  if (!connection.Runs("bbr")) GTEST_SKIP() << "this kernel lets nobody here choose BBR";
  SetCongestion(connection.client, "");
  EXPECT_EQ(CongestionOf(connection.client), "reno");
}

TEST(Congestion, WhatIsClockedByAcknowledgementsStays) {
  const Connection connection;
  if (!connection.Runs("cubic")) GTEST_SKIP() << "this kernel lets nobody here choose CUBIC";
  SetCongestion(connection.client, "auto");
  EXPECT_EQ(CongestionOf(connection.client), "cubic");
}

TEST(Congestion, TheSystemsChoiceStaysIfThatIsWanted) {
  const Connection connection;
  if (!connection.Runs("bbr")) GTEST_SKIP() << "this kernel lets nobody here choose BBR";
  SetCongestion(connection.client, "system");
  EXPECT_EQ(CongestionOf(connection.client), "bbr");
}

TEST(Congestion, ANameIsChosen) {
  const Connection connection;
  SetCongestion(connection.client, "reno");
  EXPECT_EQ(CongestionOf(connection.client), "reno");
}

TEST(Congestion, WhatMayNotBeChosenIsRefusedWithWhatMay) {
  EXPECT_TRUE(CheckCongestion("").ok());
  EXPECT_TRUE(CheckCongestion("auto").ok());
  EXPECT_TRUE(CheckCongestion("system").ok());
  EXPECT_TRUE(CheckCongestion("reno").ok());
  const absl::Status bad = CheckCongestion("no-such-control");
  EXPECT_TRUE(absl::IsInvalidArgument(bad)) << bad;
  EXPECT_NE(bad.message().find("'no-such-control'"), std::string::npos) << bad;
  EXPECT_NE(bad.message().find("reno"), std::string::npos) << bad;
}

TEST(Congestion, ALongNameIsRefusedToo) {
  EXPECT_TRUE(absl::IsInvalidArgument(CheckCongestion(std::string(300, 'a'))));
}

}  // namespace
}  // namespace thinwire
