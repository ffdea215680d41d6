// The contract of transport/data_plane.h, the same for every data plane.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tests/effort.h"
#include "tests/leaks.h"
#include "tests/transport/connect_ucx.h"
#include "tests/transport/plane_kinds.h"
#include "transport/planes.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class DataPlaneTest : public testing::TestWithParam<PlaneKind> {
 protected:
  void SetUp() override {
    if (!GetParam().needs_ucx) return;
    if (const absl::Status absent = UcxIsHere(); !absent.ok()) GTEST_SKIP() << absent;
  }

  // Calls body(plane) on one thread per rank. The planes live until all calls have returned.
  void Run(int world, const std::function<void(DataPlane&)>& body) {
    Planes planes = GetParam().make(world);
    std::vector<std::thread> threads;
    for (auto& plane : planes) threads.emplace_back([&] { body(*plane); });
    for (std::thread& thread : threads) thread.join();
  }
};
INSTANTIATE_TEST_SUITE_P(All, DataPlaneTest, testing::ValuesIn(PlaneKinds()),
                         [](const auto& info) { return info.param.name; });

Deadline Soon() { return Clock::now() + seconds(20); }

// Returns the block that rank `from` sends to rank `to`: every byte shows where it belongs.
std::vector<uint8_t> Block(uint64_t tag, int from, int to, size_t bytes) {
  // Copies a pattern, since sanitizers take seconds to watch megabytes byte by byte.
  std::array<uint8_t, 256> pattern;
  for (size_t i = 0; i < pattern.size(); ++i)
    pattern[i] = static_cast<uint8_t>(tag * 31 + from * 7 + to * 3 + i);
  std::vector<uint8_t> block(bytes);
  for (size_t done = 0; done < bytes; done += pattern.size()) {
    std::memcpy(block.data() + done, pattern.data(), std::min(pattern.size(), bytes - done));
  }
  return block;
}

absl::Status AllToAll(DataPlane& t, uint64_t tag, size_t bytes, Deadline deadline) {
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

TEST_P(DataPlaneTest, EveryBlockArrivesWhereItBelongs) {
  for (int world = 1; world <= 5; ++world) {
    Run(world, [](DataPlane& t) {
      uint64_t tag = 0;
      for (const size_t bytes : {0, 1, 13, 4096, 100001, kSanitized ? 1 << 18 : 3 << 20}) {
        EXPECT_TRUE(AllToAll(t, ++tag, bytes, Soon()).ok()) << bytes;
      }
    });
  }
}

TEST_P(DataPlaneTest, OneBlockGoesToEverybody) {
  Run(4, [](DataPlane& t) {
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

// Some ranks start to receive before their own blocks are ready, and others do not.
TEST_P(DataPlaneTest, ExpectedBlocksArriveLikeOthers) {
  constexpr int kRounds = 20;
  Run(3, [](DataPlane& t) {
    for (int round = 0; round < kRounds; ++round) {
      std::vector<std::vector<uint8_t>> out, in;
      for (int r = 0; r < 3; ++r) {
        out.push_back(Block(round, t.rank(), r, 5000));
        in.emplace_back(5000);
      }
      const std::vector<Bytes> send(out.begin(), out.end());
      const std::vector<MutableBytes> recv(in.begin(), in.end());
      std::unique_ptr<Exchange> exchange;
      if ((round + t.rank()) % 3 != 0) {
        exchange = t.Expect(round, recv);
        ASSERT_EQ(exchange != nullptr, GetParam().receives_ahead);
      }
      if (exchange == nullptr) {
        exchange = t.Start(round, send, recv);
      } else {
        exchange->Send(send);
      }
      ASSERT_TRUE(exchange->Wait(Soon()).ok());
      for (int r = 0; r < 3; ++r) {
        ASSERT_TRUE(r == t.rank() || in[r] == Block(round, r, t.rank(), 5000));
      }
    }
    EXPECT_EQ(t.bytes_sent(), kRounds * 2 * 5000u);
  });
}

TEST_P(DataPlaneTest, AnExpectedExchangeThatIsDroppedFailsThePlane) {
  Run(2, [](DataPlane& t) {
    std::vector<uint8_t> block(10);
    const std::vector<MutableBytes> recv(2, block);
    if (t.rank() == 0 && t.Expect(1, recv) != nullptr) {
      EXPECT_TRUE(absl::IsInternal(t.status())) << t.status();
    }
  });
}

// Ranks start their exchanges in different orders, on several threads, and wait in a third order.
TEST_P(DataPlaneTest, TagsKeepExchangesApartInAnyOrder) {
  if (GetParam().traits.matching == Matching::kByOrder) GTEST_SKIP() << "matches by order";
  constexpr int kTags = 20;
  Run(3, [](DataPlane& t) {
    const auto exchange = [&t](uint64_t base) {
      std::vector<std::vector<std::vector<uint8_t>>> out(kTags), in(kTags);
      std::vector<std::unique_ptr<Exchange>> pending(kTags);
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

// All ranks start the same exchanges in the same order, and each waits in its own order.
TEST_P(DataPlaneTest, ManyExchangesAreInFlightAtOnce) {
  constexpr int kExchanges = 50;
  Run(3, [](DataPlane& t) {
    const auto bytes = [](int k) { return 200 + k % 7; };
    std::vector<std::vector<std::vector<uint8_t>>> out(kExchanges), in(kExchanges);
    std::vector<std::unique_ptr<Exchange>> exchanges;
    for (int k = 0; k < kExchanges; ++k) {
      for (int r = 0; r < 3; ++r) {
        out[k].push_back(Block(k, t.rank(), r, bytes(k)));
        in[k].emplace_back(bytes(k));
      }
      const std::vector<Bytes> send(out[k].begin(), out[k].end());
      const std::vector<MutableBytes> recv(in[k].begin(), in[k].end());
      exchanges.push_back(t.Start(k, send, recv));
    }
    for (int j = 0; j < kExchanges; ++j) {
      const int k = (j * (2 * t.rank() + 1) + 7) % kExchanges;
      if (exchanges[k] == nullptr) continue;
      ASSERT_TRUE(std::exchange(exchanges[k], nullptr)->Wait(Soon()).ok());
      for (int r = 0; r < 3; ++r) {
        ASSERT_TRUE(r == t.rank() || in[k][r] == Block(k, r, t.rank(), bytes(k)));
      }
    }
    for (auto& exchange : exchanges) {
      if (exchange == nullptr) continue;
      ASSERT_TRUE(exchange->Wait(Soon()).ok());
    }
  });
}

TEST_P(DataPlaneTest, SaysWhatItIs) {
  Run(2, [](DataPlane& t) {
    EXPECT_EQ(t.size(), 2);
    EXPECT_EQ(t.traits().matching, GetParam().traits.matching);
    EXPECT_EQ(t.traits().completion, GetParam().traits.completion);
    EXPECT_EQ(t.traits().memory, GetParam().traits.memory);
  });
}

// Exchanges that end only by Wait return an error if OnDone is called.
TEST_P(DataPlaneTest, OnDoneOfABlockingPlaneIsInternal) {
  if (GetParam().traits.completion == Completion::kEvents) GTEST_SKIP() << "completes by events";
  Run(2, [](DataPlane& t) {
    absl::Status status;
    const std::vector<Bytes> send(2);
    const std::vector<MutableBytes> recv(2);
    const auto exchange = t.Start(1, send, recv);
    exchange->OnDone([&status](absl::Status got) { status = std::move(got); });
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    EXPECT_TRUE(exchange->Wait(Soon()).ok());
  });
}

TEST_P(DataPlaneTest, AnExchangeThatIsDroppedFailsThePlane) {
  Run(2, [](DataPlane& t) {
    if (t.rank() == 1) return;
    std::vector<uint8_t> block(10);
    t.Start(1, std::vector<Bytes>(2), std::vector<MutableBytes>(2, block)).reset();
    EXPECT_TRUE(absl::IsInternal(t.status())) << t.status();
    EXPECT_TRUE(absl::IsInternal(AllToAll(t, 2, 100, Soon())));
  });
}

TEST_P(DataPlaneTest, PastTheDeadlineEverythingFailsForGood) {
  Run(2, [](DataPlane& t) {
    if (t.rank() == 1) return;
    EXPECT_TRUE(absl::IsDeadlineExceeded(AllToAll(t, 1, 100, Clock::now() + milliseconds(50))));
    EXPECT_TRUE(absl::IsDeadlineExceeded(t.status()));
    EXPECT_TRUE(absl::IsDeadlineExceeded(AllToAll(t, 2, 100, Soon())));
    EXPECT_TRUE(absl::IsDeadlineExceeded(AllToAll(t, 3, 0, Soon())));
  });
}

TEST_P(DataPlaneTest, SizesThatDisagreeNeverMeet) {
  Run(2, [](DataPlane& t) {
    const absl::Status status =
        AllToAll(t, 1, t.rank() == 0 ? 100 : 101, Clock::now() + milliseconds(100));
    EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status)) << status;
  });
}

TEST_P(DataPlaneTest, AbortEndsEveryWaitWithItsReason) {
  Run(2, [](DataPlane& t) {
    if (t.rank() == 1) return;
    std::vector<std::thread> waiters;
    std::atomic<int> ended = 0;
    for (int i = 0; i < 4; ++i) {
      waiters.emplace_back([&, i] {
        const absl::Status status = AllToAll(t, i, 64, Clock::now() + seconds(60));
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

// Between Expect and Send no thread waits for the exchange, so the abort has none to wake.
TEST_P(DataPlaneTest, AnExpectedExchangeThatIsSentAfterAnAbortEndsWithTheReason) {
  if (!GetParam().receives_ahead) GTEST_SKIP() << "receives nothing ahead";
  Run(2, [](DataPlane& t) {
    if (t.rank() == 1) return;
    for (const size_t bytes : {100, 100000}) {
      std::vector<uint8_t> in(bytes), out(bytes);
      const auto exchange = t.Expect(bytes, std::vector<MutableBytes>(2, in));
      t.Abort(absl::AbortedError("enough"));
      exchange->Send(std::vector<Bytes>(2, out));
      const absl::Status status = exchange->Wait(Soon());
      EXPECT_EQ(status.message(), "enough") << status;
    }
  });
}

// Blocks of all sizes are on their way, some of them in part, and their memory is freed at once.
// The sanitizers find later accesses to it.
TEST_P(DataPlaneTest, AnAbortInTheMidstEndsAllThatIsUnderWay) {
  constexpr int kRanks = 3;
  const int threads = GetParam().traits.matching == Matching::kByOrder ? 1 : 3;
  for (int round = 0; round < 8; ++round) {
    const int enough = 1 + 29 * round;
    std::atomic<int> ended = 0;
    Run(kRanks, [&](DataPlane& t) {
      std::vector<std::thread> callers;
      for (int i = 0; i < threads; ++i) {
        callers.emplace_back([&, i] {
          constexpr size_t kSizes[] = {40, 700, 5000, 16384, 16385, 200000};
          absl::Status status;
          for (int k = 0; status.ok(); ++k) {
            status = AllToAll(t, 1000000 * i + k, kSizes[(k + i) % std::size(kSizes)], Soon());
            ++ended;
            ended.notify_all();
          }
          EXPECT_EQ(status, t.status());
        });
      }
      for (int count = ended; count < enough; count = ended) ended.wait(count);
      t.Abort(absl::AbortedError("enough"));
      for (std::thread& caller : callers) caller.join();
    });
  }
}

TEST_P(DataPlaneTest, ALostPeerIsNamed) {
  Planes planes = GetParam().make(3);
  std::thread waiter([&] {
    const absl::Status status = AllToAll(*planes[0], 1, 100, Soon());
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_NE(status.message().find("rank 2"), absl::string_view::npos) << status;
    EXPECT_EQ(AllToAll(*planes[0], 2, 100, Soon()), status);
  });
  planes[2].reset();
  waiter.join();
}

TEST_P(DataPlaneTest, NothingIsLeftAfter100Rounds) {
  Run(2, [](DataPlane& t) { ASSERT_TRUE(AllToAll(t, 1, 10, Soon()).ok()); });
  const Held before = Held::Now();
  for (int round = 0; round < 100; ++round) {
    Run(2, [](DataPlane& t) { ASSERT_TRUE(AllToAll(t, 1, 10, Soon()).ok()); });
  }
  EXPECT_LE(Held::Settled(before), before);
}

}  // namespace
}  // namespace thinwire
