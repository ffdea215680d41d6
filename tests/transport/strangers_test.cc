// Strangers connect to a group that is connecting over Gloo. They neither end a process, nor fail
// the group, nor keep a rank away, nor change a result.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "schedule/engine/engine.h"
#include "tests/transport/listening.h"
#include "transport/gloo/gloo.h"
#include "transport/mesh/challenge.h"
#include "transport/mesh/descriptor.h"
#include "transport/mesh/group_key.h"

namespace thinwire {
namespace {

using std::chrono::seconds;

constexpr int kWorld = 3;
constexpr char kPrefix[] = "t/", kDigest[] = "digest";

// Blocks a rank after it has stored its address and before it reads the others', so that these have
// opened their sockets and wait for it.
class GateStore final : public Store {
 public:
  explicit GateStore(std::shared_ptr<Store> inner) : inner_(std::move(inner)) {}

  absl::Status Set(std::string_view key, std::string_view value) override {
    const absl::Status status = inner_->Set(key, value);
    told_ = true;
    return status;
  }
  absl::StatusOr<std::string> Get(std::string_view key, Deadline deadline) override {
    if (told_) {
      const absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&open_));
    }
    return inner_->Get(key, deadline);
  }
  void Open() {
    const absl::MutexLock lock(&mu_);
    open_ = true;
  }

 private:
  const std::shared_ptr<Store> inner_;
  std::atomic<bool> told_{false};
  absl::Mutex mu_;
  bool open_ ABSL_GUARDED_BY(mu_) = false;
};

int PortOf(int rank, Store& store) {
  const std::string hello =
      store.Get(absl::StrCat(kPrefix, "mesh/", rank), Clock::now() + seconds(60)).value_or("");
  const std::vector<std::string> fields = absl::StrSplit(hello, ' ');
  return fields.size() == 3 ? std::stoi(fields[1]) : 0;
}

// The messages of strangers, besides random bytes.
std::vector<std::string> CraftedMessages(Store& store) {
  const std::string token = store.Get("t/mesh/token", Clock::now() + seconds(60)).value_or("");
  const std::string digest = HmacSha256(kPrefix, kDigest);
  const Identity rank0{0, kWorld, GroupKey("", token), digest};
  const Identity rank2{2, kWorld, GroupKey("", token), digest};
  const Identity wrong{2, kWorld, GroupKey("", "another token"), digest};
  // A whole handshake, as recorded from a connection between rank 2 and rank 0.
  Challenge caller = Challenge::AsClient(rank2, 0), door = Challenge::AsServer(rank0);
  const std::string hello = caller.hello();
  std::string reply, proof, admission;
  EXPECT_TRUE(door.Take(hello, &reply).ok() && caller.Take(reply, &proof).ok() &&
              door.Take(proof, &admission).ok());
  const auto gloo = [](uint64_t opcode, uint64_t slot, uint64_t bytes) {
    const uint64_t preamble[6] = {48 + bytes, opcode, slot, 0, bytes, 0};
    return std::string(reinterpret_cast<const char*>(preamble), sizeof(preamble));
  };
  return {"",
          "\n",
          gloo(0, 0, 0),
          gloo(1, 0, 0),
          gloo(1, 2, 64),
          gloo(1, ~0ull, ~0ull),
          gloo(2, 2, 64),
          gloo(3, 2, 64),
          gloo(77, 0, 1),
          gloo(1, 2, 64) + std::string(64, 'x'),
          "GET / HTTP/1.1\r\nHost: rank0\r\n\r\n",
          "SSH-2.0-OpenSSH_9.2\r\n",
          std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11),
          std::string(112, '\0'),
          std::string(113, '\xff'),
          std::string(100000, 'a'),
          hello.substr(0, 1),
          hello.substr(0, 56),
          hello.substr(0, 111),
          hello,
          hello + hello,
          hello + proof,
          hello + proof + gloo(1, 2, 64),
          hello + std::string(40, 'p'),
          reply,
          hello + admission,
          Challenge::AsClient(wrong, 0).hello(),
          Challenge::AsClient(rank2, 1).hello(),
          Challenge::AsClient(rank0, 0).hello()};
}

// Strangers that connect, send their messages and leave: at once or after three hundred others have
// come, by an orderly close or a reset. Not thread-safe.
class Strangers {
 public:
  Strangers(std::vector<int> ports, std::vector<std::string> messages, unsigned seed)
      : ports_(std::move(ports)), messages_(std::move(messages)), random_(seed) {}

  void Visit(int count) {
    for (int i = 0; i < count; ++i) VisitOne(ports_[i % ports_.size()]);
  }

  int came() const { return came_; }

 private:
  void VisitOne(int port) {
    Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(socket.fd(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
      pollfd connecting{socket.fd(), POLLOUT, 0};
      if (errno != EINPROGRESS || poll(&connecting, 1, 100) != 1) return;
    }
    std::string message;
    if (const size_t which = random_() % (2 * messages_.size()); which < messages_.size()) {
      message = messages_[which];
    } else {
      message.resize(random_() % 300);
      for (char& c : message) c = static_cast<char>(random_());
    }
    if (send(socket.fd(), message.data(), message.size(), MSG_NOSIGNAL) >= 0) ++came_;
    if (random_() % 8 == 0) {
      const linger reset{1, 0};
      setsockopt(socket.fd(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    } else if (random_() % 8 == 0) {
      shutdown(socket.fd(), SHUT_WR);
    }
    if (random_() % 2 == 0) return;
    staying_.push_back(std::move(socket));
    if (staying_.size() > 300) staying_.pop_front();
  }

  const std::vector<int> ports_;
  const std::vector<std::string> messages_;
  std::mt19937 random_;
  std::deque<Descriptor> staying_;
  int came_ = 0;
};

GlooOptions Rank(int rank, std::shared_ptr<Store> store) {
  return {.rank = rank,
          .size = kWorld,
          .store = std::move(store),
          .prefix = kPrefix,
          .interface = "",
          .rendezvous_host = "",
          .deadline = Clock::now() + std::chrono::minutes(10),  // after all strangers
          .key_file = "",
          .digest = kDigest};
}

void ReduceOnAll(std::vector<absl::StatusOr<Transport>> transports) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kWorld; ++rank) {
    threads.emplace_back([&, rank] {
      ASSERT_TRUE(transports[rank].ok()) << transports[rank].status();
      Options options;
      options.codecs = {*CodecPair::Parse("fp32")};
      auto engine = *Engine::Create(Settle(options, kWorld), *std::move(transports[rank]));
      for (int step = 0; step < 5; ++step) {
        std::vector<float> values(100000, static_cast<float>(rank + step));
        const TensorView view{values.data(), values.size()};
        auto work = engine->Start({.input = view, .output = view, .key = "g"});
        ASSERT_TRUE(work.ok()) << work.status();
        const absl::Status status = (*work)->Wait();
        ASSERT_TRUE(status.ok()) << status;
        for (const float value : values) ASSERT_EQ(value, static_cast<float>(1 + step));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void ConnectAmong(int count) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  const std::shared_ptr<Store> store = MakeInProcessStore();
  const auto gate = std::make_shared<GateStore>(store);
  std::vector<absl::StatusOr<Transport>> transports(kWorld);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kWorld - 1; ++rank) {
    ranks.emplace_back([&, rank] { transports[rank] = ConnectGloo(Rank(rank, store)); });
  }
  Strangers strangers({PortOf(0, *store), PortOf(1, *store)}, CraftedMessages(*store), seed);
  strangers.Visit(100);  // the last rank has not started
  ranks.emplace_back([&] { transports[kWorld - 1] = ConnectGloo(Rank(kWorld - 1, gate)); });
  while (strangers.came() < count) strangers.Visit(2);  // the other ranks wait for it
  std::atomic<bool> connected{false};
  std::thread going_on([&] {
    while (!connected) strangers.Visit(2);
  });
  gate->Open();
  for (std::thread& rank : ranks) rank.join();
  connected = true;
  going_on.join();
  EXPECT_TRUE(ListeningSockets().empty()) << "somebody still listens";
  ReduceOnAll(std::move(transports));
}

TEST(GlooStrangers, AreTurnedAway) { ConnectAmong(3000); }
TEST(GlooStrangers, AHundredThousandAreTurnedAway) { ConnectAmong(100000); }

}  // namespace
}  // namespace thinwire
