// Gloo's pairs over our connections, and the assumptions that they need.
#include "transport/gloo/gloo_pair.h"

#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/pair.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <vector>

#include "tests/leaks.h"
#include "transport/mesh/tcp.h"

namespace thinwire {
namespace {

namespace tcp = gloo::transport::tcp;
using std::chrono::milliseconds;

std::shared_ptr<tcp::Device> MakeDevice() {
  tcp::attr attr;
  attr.hostname = "127.0.0.1";
  return std::dynamic_pointer_cast<tcp::Device>(tcp::CreateDevice(attr));
}

// The two ends of a TCP connection.
struct Ends {
  Descriptor ours, theirs;

  Ends() {
    absl::StatusOr<Listener> listener = Listener::Open(*Address::Of("127.0.0.1", 0));
    EXPECT_TRUE(listener.ok()) << listener.status();
    theirs = Descriptor(::socket(AF_INET, SOCK_STREAM, 0));
    EXPECT_EQ(connect(theirs.fd(), listener->address().get(), listener->address().length), 0);
    ours = *listener->Accept();
    EXPECT_TRUE(ours.valid());
  }
};

// The allocator may add some bytes to an object; the sanitizer's adds none.
template <typename Object>
void ExpectSizeOf(Object* object) {
  const size_t allocated = malloc_usable_size(dynamic_cast<void*>(object));
  EXPECT_GE(allocated, sizeof(Object));
  EXPECT_LE(allocated, sizeof(Object) + 24);
}

// One of Gloo's headers may be missing, and ours replaces it. If its types had other sizes, the
// pairs would have other sizes than the library allocates.
TEST(GlooPair, AndItsContextHaveTheLayoutThatTheLibraryHas) {
  const auto device = MakeDevice();
  const auto context = std::dynamic_pointer_cast<tcp::Context>(device->createContext(0, 2));
  ASSERT_NE(context, nullptr);
  auto* const pair = dynamic_cast<tcp::Pair*>(context->createPair(1).get());
  ASSERT_NE(pair, nullptr);
  ExpectSizeOf(pair);
  ExpectSizeOf(context.get());
}

TEST(GlooPair, IsConnectedAndListensNoMore) {
  const Held before = Held::Now();
  {
    const auto device = MakeDevice();
    GlooLoop loop(device);
    Ends ends;
    std::vector<Descriptor> connections(2);
    connections[1] = std::move(ends.ours);
    absl::Status broken;
    const auto context =
        GlooContextOf(0, std::move(connections), device, loop, milliseconds(1000), "", broken);
    ASSERT_TRUE(broken.ok()) << broken;
    EXPECT_TRUE(IsConnected(*context, 1));
    context->closeConnections();
    char byte;
    EXPECT_LE(recv(ends.theirs.fd(), &byte, 1, 0), 0);  // closed or reset
  }
  const Held after = Held::Settled(before);
  EXPECT_TRUE(after <= before) << after << ", and " << before << " before";
}

TEST(GlooPair, RunsTheCongestionControlThatIsAskedFor) {
  const auto device = MakeDevice();
  GlooLoop loop(device);
  Ends ends;
  const int socket = ends.ours.fd();
  std::vector<Descriptor> connections(2);
  connections[1] = std::move(ends.ours);
  absl::Status broken;
  const auto context =
      GlooContextOf(0, std::move(connections), device, loop, milliseconds(1000), "reno", broken);
  char name[16] = {};
  socklen_t size = sizeof(name);
  ASSERT_EQ(getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, &size), 0);
  EXPECT_STREQ(name, "reno");
  CloseConnections(*context, loop);
}

TEST(GlooPair, OfAConnectionThatBrokeIsAnErrorThatNamesTheRank) {
  const auto device = MakeDevice();
  GlooLoop loop(device);
  Ends ends;
  const linger reset{1, 0};
  ASSERT_EQ(setsockopt(ends.theirs.fd(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)), 0);
  ends.theirs = Descriptor();
  std::vector<Descriptor> connections(2);
  connections[1] = std::move(ends.ours);
  absl::Status broken;
  const auto context =
      GlooContextOf(0, std::move(connections), device, loop, milliseconds(1000), "", broken);
  EXPECT_TRUE(absl::IsUnavailable(broken)) << broken;
  EXPECT_NE(broken.message().find("rank 1 is gone"), absl::string_view::npos);
  EXPECT_FALSE(IsConnected(*context, 1));
}

}  // namespace
}  // namespace thinwire
