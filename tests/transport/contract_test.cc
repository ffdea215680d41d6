// The contract of transport/transport.h, the same for every transport.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/device.h"
#include "kernels/host_device.h"
#include "tests/leaks.h"
#include "transport/gloo.h"
#include "transport/in_process.h"
#include "transport/staged.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Transports = std::vector<std::unique_ptr<Transport>>;

Transports MakeGloo(int world) {
  const auto store = MakeInProcessStore();
  Transports transports(world);
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      auto made = ConnectGloo({r, world, store, "t/", "", "", Clock::now() + seconds(20)});
      ASSERT_TRUE(made.ok()) << made.status();
      transports[r] = *std::move(made);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return transports;
}

// A staged transport and what it stands on. Memory of the host's device is memory, so that the
// tests' own blocks serve.
class StagedOnInProcess final : public Transport {
 public:
  explicit StagedOnInProcess(std::unique_ptr<Transport> host)
      : host_(std::move(host)),
        device_(MakeDevice(kernels::HostDeviceApi(), 0, "host:0")),
        stream_(*device_->MakeStream()),
        staged_(*host_, *device_, *stream_, seconds(20)) {}
  int rank() const override { return staged_.rank(); }
  int size() const override { return staged_.size(); }
  std::unique_ptr<Pending> Start(uint64_t tag, std::span<const Bytes> send,
                                 std::span<const MutableBytes> recv) override {
    return std::make_unique<Synchronized>(staged_.Start(tag, send, recv), *stream_);
  }
  absl::Status SendControl(int to, const ControlFrame& frame) override {
    return staged_.SendControl(to, frame);
  }
  absl::StatusOr<ControlMessage> ReceiveControl() override { return staged_.ReceiveControl(); }
  void Abort(absl::Status reason) override { staged_.Abort(std::move(reason)); }
  void FlushControl(Deadline deadline) override { staged_.FlushControl(deadline); }
  absl::Status status() const override { return staged_.status(); }
  uint64_t bytes_sent() const override { return staged_.bytes_sent(); }

 private:
  // The tests look at what they received without a stream.
  class Synchronized final : public Pending {
   public:
    Synchronized(std::unique_ptr<Pending> inner, DeviceStream& stream)
        : inner_(std::move(inner)), stream_(stream) {}
    absl::Status Wait(Deadline deadline) override {
      const absl::Status status = inner_->Wait(deadline);
      return status.ok() ? stream_.Synchronize(deadline) : status;
    }

   private:
    const std::unique_ptr<Pending> inner_;
    DeviceStream& stream_;
  };

  const std::unique_ptr<Transport> host_;
  const std::shared_ptr<Device> device_;
  const std::unique_ptr<DeviceStream> stream_;
  Staged staged_;
};

Transports MakeStaged(int world) {
  Transports transports = MakeInProcessTransports(world);
  for (auto& transport : transports) {
    transport = std::make_unique<StagedOnInProcess>(std::move(transport));
  }
  return transports;
}

struct Kind {
  const char* name;
  std::function<Transports(int)> make;
};

class ContractTest : public testing::TestWithParam<Kind> {
 protected:
  // body(transport) on a thread for each rank; the transports live until all have returned.
  void Run(int world, const std::function<void(Transport&)>& body) {
    Transports transports = GetParam().make(world);
    std::vector<std::thread> threads;
    for (auto& transport : transports) threads.emplace_back([&] { body(*transport); });
    for (std::thread& thread : threads) thread.join();
  }
};
INSTANTIATE_TEST_SUITE_P(All, ContractTest,
                         testing::Values(Kind{"InProcess", MakeInProcessTransports},
                                         Kind{"Gloo", MakeGloo}, Kind{"Staged", MakeStaged}),
                         [](const auto& info) { return info.param.name; });

Deadline Soon() { return Clock::now() + seconds(20); }

// What rank `from` sends to rank `to`: every byte tells where it belongs.
std::vector<uint8_t> Block(uint64_t tag, int from, int to, size_t bytes) {
  std::vector<uint8_t> block(bytes);
  for (size_t i = 0; i < bytes; ++i)
    block[i] = static_cast<uint8_t>(tag * 31 + from * 7 + to * 3 + i);
  return block;
}

absl::Status AllToAll(Transport& t, uint64_t tag, size_t bytes, Deadline deadline) {
  std::vector<std::vector<uint8_t>> out(t.size()), in(t.size(), std::vector<uint8_t>(bytes));
  std::vector<Bytes> send(t.size());
  std::vector<MutableBytes> recv(t.size());
  for (int r = 0; r < t.size(); ++r) {
    out[r] = Block(tag, t.rank(), r, bytes);
    send[r] = out[r];
    recv[r] = in[r];
  }
  if (absl::Status status = t.Start(tag, send, recv)->Wait(deadline); !status.ok()) return status;
  for (int r = 0; r < t.size(); ++r) {
    EXPECT_TRUE(r == t.rank() || in[r] == Block(tag, r, t.rank(), bytes)) << "from rank " << r;
  }
  return absl::OkStatus();
}

TEST_P(ContractTest, EveryBlockArrivesWhereItBelongs) {
  for (int world = 1; world <= 5; ++world) {
    Run(world, [](Transport& t) {
      uint64_t tag = 0;
      for (const size_t bytes : {0, 1, 13, 4096, 100001, 3 << 20}) {
        EXPECT_TRUE(AllToAll(t, ++tag, bytes, Soon()).ok()) << bytes;
      }
    });
  }
}

TEST_P(ContractTest, OneBlockGoesToEverybody) {
  Run(4, [](Transport& t) {
    const std::vector<uint8_t> mine(1000, static_cast<uint8_t>(t.rank()));
    std::vector<std::vector<uint8_t>> in(4, std::vector<uint8_t>(1000));
    std::vector<MutableBytes> recv(in.begin(), in.end());
    ASSERT_TRUE(t.Start(1, std::vector<Bytes>(4, mine), recv)->Wait(Soon()).ok());
    for (int r = 0; r < 4; ++r) {
      EXPECT_TRUE(r == t.rank() || in[r] == std::vector<uint8_t>(1000, static_cast<uint8_t>(r)));
    }
    EXPECT_EQ(t.bytes_sent(), 3000u);
  });
}

// Every rank starts its exchanges in another order, from several threads, and waits in a third.
TEST_P(ContractTest, TagsKeepExchangesApartInAnyOrder) {
  constexpr int kTags = 20;
  Run(3, [](Transport& t) {
    const auto exchange = [&t](uint64_t base) {
      std::vector<std::vector<std::vector<uint8_t>>> out(kTags), in(kTags);
      std::vector<std::unique_ptr<Pending>> pending(kTags);
      for (int j = 0; j < kTags; ++j) {
        const int i = j * (2 * t.rank() + 1) % kTags;
        const int k = t.rank() == 2 ? kTags - 1 - j : i;
        std::vector<Bytes> send;
        std::vector<MutableBytes> recv;
        for (int r = 0; r < 3; ++r) {
          out[k].push_back(Block(base + k, t.rank(), r, 300 + k % 5));
          in[k].emplace_back(300 + k % 5);
        }
        for (int r = 0; r < 3; ++r) {
          send.push_back(out[k][r]);
          recv.push_back(in[k][r]);
        }
        pending[k] = t.Start(base + k, send, recv);
      }
      for (int k = 0; k < kTags; ++k) {
        ASSERT_TRUE(pending[k]->Wait(Soon()).ok());
        for (int r = 0; r < 3; ++r) {
          ASSERT_TRUE(r == t.rank() || in[k][r] == Block(base + k, r, t.rank(), 300 + k % 5));
        }
      }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; ++i) threads.emplace_back(exchange, 1000 * i);
    for (std::thread& thread : threads) thread.join();
  });
}

TEST_P(ContractTest, ControlFramesKeepTheirOrderAndTheirSender) {
  constexpr int kFrames = 300;
  Run(3, [](Transport& t) {
    std::thread sender([&] {
      for (int i = 0; i < kFrames; ++i) {
        ControlFrame frame{};
        frame[0] = static_cast<uint8_t>(i);
        frame[1] = static_cast<uint8_t>(i >> 8);
        for (int to = 0; to < 3; ++to) {
          ASSERT_TRUE(to == t.rank() || t.SendControl(to, frame).ok());
        }
      }
    });
    std::vector<int> next(3);
    for (int i = 0; i < 2 * kFrames; ++i) {
      const auto message = t.ReceiveControl();
      ASSERT_TRUE(message.ok()) << message.status();
      ASSERT_NE(message->from, t.rank());
      EXPECT_EQ(message->frame[0] | message->frame[1] << 8, next[message->from]++);
    }
    sender.join();
  });
}

TEST_P(ContractTest, PastTheDeadlineEverythingFailsForGood) {
  Run(2, [](Transport& t) {
    if (t.rank() == 1) return;
    EXPECT_TRUE(absl::IsDeadlineExceeded(AllToAll(t, 1, 100, Clock::now() + milliseconds(50))));
    EXPECT_TRUE(absl::IsDeadlineExceeded(t.status()));
    EXPECT_TRUE(absl::IsDeadlineExceeded(AllToAll(t, 2, 100, Soon())));
    EXPECT_TRUE(absl::IsDeadlineExceeded(t.SendControl(1, ControlFrame{})));
    EXPECT_TRUE(absl::IsDeadlineExceeded(t.ReceiveControl().status()));
  });
}

TEST_P(ContractTest, SizesThatDisagreeNeverMeet) {
  Run(2, [](Transport& t) {
    const absl::Status status =
        AllToAll(t, 1, t.rank() == 0 ? 100 : 101, Clock::now() + milliseconds(100));
    EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status)) << status;
  });
}

TEST_P(ContractTest, AbortEndsEveryWaitWithItsReason) {
  Run(2, [](Transport& t) {
    if (t.rank() == 1) return;
    std::vector<std::thread> waiters;
    std::atomic<int> ended = 0;
    for (int i = 0; i < 4; ++i) {
      waiters.emplace_back([&, i] {
        const absl::Status status =
            i == 0 ? t.ReceiveControl().status() : AllToAll(t, i, 64, Clock::now() + seconds(60));
        EXPECT_EQ(status.message(), "enough") << status;
        ++ended;
      });
    }
    t.Abort(absl::AbortedError("enough"));
    t.Abort(absl::InternalError("too late: the first reason wins"));
    for (std::thread& waiter : waiters) waiter.join();
    EXPECT_EQ(ended, 4);
    EXPECT_TRUE(absl::IsAborted(t.status()));
  });
}

TEST_P(ContractTest, ALostPeerIsNamed) {
  Transports transports = GetParam().make(3);
  std::thread waiter([&] {
    const absl::Status status = transports[0]->ReceiveControl().status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_NE(status.message().find("rank 2"), absl::string_view::npos) << status;
    const absl::Status exchange = AllToAll(*transports[0], 1, 100, Soon());
    EXPECT_NE(exchange.message().find("rank 2"), absl::string_view::npos) << exchange;
  });
  transports[2].reset();
  waiter.join();
}

TEST_P(ContractTest, NothingIsLeftAfter100Rounds) {
  Run(2, [](Transport& t) { ASSERT_TRUE(AllToAll(t, 1, 10, Soon()).ok()); });
  const Held before = Held::Now();
  for (int round = 0; round < 100; ++round) {
    Run(2, [](Transport& t) { ASSERT_TRUE(AllToAll(t, 1, 10, Soon()).ok()); });
  }
  EXPECT_LE(Held::Settled(before), before);
}

}  // namespace
}  // namespace thinwire
