// Which congestion control connections run, as the kernel says.
#include "transport/mesh/congestion.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>

#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

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
    EXPECT_EQ(fcntl(server.fd(), F_SETFL, 0), 0);  // it blocks
  }
  // False where the kernel lacks it, or does not let this process choose it.
  bool Runs(const std::string& name) const {
    return setsockopt(client.fd(), IPPROTO_TCP, TCP_CONGESTION, name.data(), name.size()) == 0;
  }
  // What the client runs once it was set to `congestion`.
  std::string After(const std::string& congestion) const {
    Congestion(client.fd(), congestion);
    return CongestionOf(client.fd());
  }
  // The same, once `bytes` have gone to the server.
  std::string AfterSending(const std::string& congestion, size_t bytes) const {
    Congestion control(client.fd(), congestion);
    std::thread reader([&] {
      std::vector<char> room(1 << 16);
      for (size_t left = bytes; left > 0;) {
        const ssize_t count = read(server.fd(), room.data(), room.size());
        if (count <= 0) return;
        left -= static_cast<size_t>(count);
      }
    });
    const std::vector<char> some(1 << 16);
    for (size_t sent = 0; sent < bytes; sent += some.size()) {
      EXPECT_EQ(send(client.fd(), some.data(), some.size(), 0), ssize_t(some.size()));
      control.OnProgress();
    }
    reader.join();
    return CongestionOf(client.fd());
  }

  Listener listener;
  Descriptor client, server;
};

TEST(Congestion, NearRanksAreNotPacedByTimers) {
  const Connection connection;
  if (!connection.Runs("bbr")) GTEST_SKIP() << "this kernel lets nobody here choose BBR";
  EXPECT_EQ(connection.After("auto"), "reno");
}

TEST(Congestion, AnEmptyNameIsAuto) {
  const Connection connection;
  if (!connection.Runs("bbr")) GTEST_SKIP() << "this kernel lets nobody here choose BBR";
  EXPECT_EQ(connection.After(""), "reno");
}

TEST(Congestion, WhatIsClockedByAcknowledgementsStays) {
  const Connection connection;
  if (!connection.Runs("cubic")) GTEST_SKIP() << "this kernel lets nobody here choose CUBIC";
  EXPECT_EQ(connection.After("auto"), "cubic");
}

TEST(Congestion, TheSystemsChoiceStaysIfThatIsWanted) {
  const Connection connection;
  if (!connection.Runs("bbr")) GTEST_SKIP() << "this kernel lets nobody here choose BBR";
  EXPECT_EQ(connection.After("system"), "bbr");
}

TEST(Congestion, ANameIsChosen) {
  const Connection connection;
  EXPECT_EQ(connection.After("reno"), "reno");
}

TEST(Congestion, NearRanksStayUnpacedWhereTheLinkIsFast) {
  const Connection connection;
  if (!connection.Runs("bbr")) GTEST_SKIP() << "this kernel lets nobody here choose BBR";
  EXPECT_EQ(connection.AfterSending("auto", size_t{64} << 20), "reno");
}

// In a network namespace of its own, which belongs to one thread.
TEST(Congestion, BehindASlowLinksQueueBBRComesBackUnlessRenoWasAskedFor) {
  std::string skipped = "network namespaces need root";
  std::thread([&] {
    if (unshare(CLONE_NEWNET) != 0) return;
    skipped = "ip and tc (package iproute2) are not here";
    if (std::system("ip link set lo up && "
                    "tc qdisc add dev lo root tbf rate 1gbit burst 128kb latency 20ms") != 0) {
      return;
    }
    skipped = "this kernel lets nobody here choose BBR";
    const Connection near, told;
    if (!near.Runs("bbr") || !told.Runs("bbr")) return;
    skipped.clear();
    EXPECT_EQ(near.AfterSending("auto", size_t{16} << 20), "bbr");
    EXPECT_EQ(told.AfterSending("reno", size_t{16} << 20), "reno");
  }).join();
  if (!skipped.empty()) GTEST_SKIP() << skipped;
}

TEST(Congestion, AQueueIsWhatManyBytesWaitInForLong) {
  tcp_info slow{};
  slow.tcpi_snd_mss = 1024;
  slow.tcpi_unacked = 1024;             // a MiB
  slow.tcpi_rtt = 8000;                 // microseconds
  slow.tcpi_delivery_rate = 125000000;  // 1 Gb/s
  EXPECT_TRUE(IsBehindAQueue(slow));
  EXPECT_FALSE(IsBehindAQueue({}));

  tcp_info fast = slow;  // whose queue is draining
  fast.tcpi_delivery_rate = 1250000000;
  EXPECT_FALSE(IsBehindAQueue(fast));
  tcp_info near = slow;
  near.tcpi_rtt = 800;
  EXPECT_FALSE(IsBehindAQueue(near));
  tcp_info idle = slow;  // and its last acknowledgement was put off
  idle.tcpi_unacked = 64;
  EXPECT_FALSE(IsBehindAQueue(idle));
  tcp_info asked_for_little = slow;
  asked_for_little.tcpi_delivery_rate_app_limited = 1;
  EXPECT_FALSE(IsBehindAQueue(asked_for_little));
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
