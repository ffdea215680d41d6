// CRC32C, and the errors that a checked plane finds. data_plane_test.cc tests that it keeps the
// contract of all planes.
#include "transport/checked/checked.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/transport/damaged_plane.h"
#include "tests/transport/late_plane.h"

namespace thinwire {
namespace {

constexpr uint64_t kTag = 0x123456789abcdef0;

// The reference: the definition, bit by bit.
uint32_t SlowCrc32c(Bytes bytes) {
  uint32_t crc = ~0u;
  for (const uint8_t byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
  }
  return ~crc;
}

std::vector<uint8_t> Random(size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> block(bytes);
  std::generate(block.begin(), block.end(), [&] { return static_cast<uint8_t>(random()); });
  return block;
}

// Values from RFC 3720, appendix B.4, and the polynomial's check value.
TEST(Crc32c, IsTheStandards) {
  const std::vector<uint8_t> zeros(32, 0), ones(32, 0xff);
  std::vector<uint8_t> ascending(32);
  for (size_t i = 0; i < 32; ++i) ascending[i] = static_cast<uint8_t>(i);
  const std::string digits = "123456789";
  EXPECT_EQ(Crc32c(0, zeros), 0x8a9136aau);
  EXPECT_EQ(Crc32c(0, ones), 0x62a8ab43u);
  EXPECT_EQ(Crc32c(0, ascending), 0x46dd794eu);
  EXPECT_EQ(Crc32c(0, {reinterpret_cast<const uint8_t*>(digits.data()), 9}), 0xe3069283u);
  EXPECT_EQ(Crc32c(0, {}), 0u);
}

TEST(Crc32c, OfEveryLengthAndInParts) {
  for (const size_t bytes : {1, 7, 8, 255, 4096, 16384, 16385, 100001}) {
    const std::vector<uint8_t> block = Random(bytes, 1);
    const uint32_t expected = SlowCrc32c(block);
    EXPECT_EQ(Crc32c(0, block), expected) << bytes;
    const Bytes whole = block;
    EXPECT_EQ(Crc32c(Crc32c(0, whole.first(bytes / 3)), whole.subspan(bytes / 3)), expected);
    std::vector<uint8_t> copy(bytes);
    EXPECT_EQ(CopyWithCrc32c(0, block, copy.data()), expected);
    EXPECT_EQ(copy, block);
  }
}

using Planes = std::vector<std::unique_ptr<DataPlane>>;

// The planes of two ranks. `damage` changes what rank 0 receives before it is checked.
Planes CheckedPlanes(Planes planes, const Damage& damage) {
  for (auto& plane : planes) {
    if (plane->rank() == 0) plane = std::make_unique<DamagedPlane>(std::move(plane), damage);
    plane = std::make_unique<Checked>(std::move(plane));
  }
  return planes;
}

// Returns the results of an exchange of random blocks, by rank. Each arrives whole or not at all.
std::vector<absl::Status> ExchangeOf(size_t bytes, Planes planes, bool by_events) {
  std::vector<absl::Status> ends(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      std::vector<uint8_t> out = Random(bytes, rank), in(bytes);
      const std::vector<Bytes> send(2, out);
      const std::vector<MutableBytes> recv(2, in);
      auto exchange = planes[rank]->Start(kTag, send, recv);
      if (by_events) {
        std::promise<absl::Status> ended;
        exchange->OnDone([&](absl::Status status) { ended.set_value(std::move(status)); });
        exchange.reset();  // may be dropped before it ends
        ends[rank] = ended.get_future().get();
      } else {
        ends[rank] = exchange->Wait(Clock::now() + std::chrono::seconds(20));
      }
      if (ends[rank].ok()) {
        EXPECT_EQ(in, Random(bytes, 1 - rank));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ends;
}

class CheckedTest : public testing::TestWithParam<bool> {
 protected:
  static Planes Make(const Damage& damage) {
    const LateOptions late{Matching::kByTag,
                           LateOptions::OutOfOrder(1, std::chrono::microseconds(50))};
    return CheckedPlanes(MakeLatePlanes(2, late), damage);
  }
};
INSTANTIATE_TEST_SUITE_P(All, CheckedTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "ByEvents" : "ByWait"; });

// One bit anywhere in the block or in its sum, for blocks of several sizes.
TEST_P(CheckedTest, OneWrongBitIsDataLossThatNamesBothRanks) {
  for (const size_t bytes : {1, 100, 40000}) {
    for (const size_t bit : {size_t{0}, 4 * bytes, 8 * bytes - 1, 8 * bytes, 8 * bytes + 31}) {
      const std::vector<absl::Status> ends =
          ExchangeOf(bytes, Make([bit](std::span<const MutableBytes> in) {
                       in[1][bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
                     }),
                     GetParam());
      EXPECT_TRUE(absl::IsDataLoss(ends[0])) << bit << ends[0];
      EXPECT_NE(ends[0].message().find("what rank 1 sent to rank 0 came damaged"),
                absl::string_view::npos)
          << ends[0];
      EXPECT_TRUE(ends[1].ok()) << ends[1];
    }
  }
}

// With many checksums a block of zeros has the sum 0; with this one it does not.
TEST_P(CheckedTest, SwappedHalvesAndZerosAreDataLoss) {
  for (const Damage& damage : {Damage([](std::span<const MutableBytes> in) {
                                 std::rotate(in[1].begin(), in[1].begin() + 500,
                                             in[1].begin() + 1000);
                               }),
                               Damage([](std::span<const MutableBytes> in) {
                                 std::fill(in[1].begin(), in[1].end(), uint8_t{0});
                               })}) {
    const std::vector<absl::Status> ends = ExchangeOf(1000, Make(damage), GetParam());
    EXPECT_TRUE(absl::IsDataLoss(ends[0])) << ends[0];
  }
}

TEST_P(CheckedTest, WithoutDamageTheBlocksArrive) {
  for (const size_t bytes : {1, 100, 40000}) {
    for (const absl::Status& end : ExchangeOf(bytes, Make([](auto) {}), GetParam())) {
      EXPECT_TRUE(end.ok()) << end;
    }
  }
}

}  // namespace
}  // namespace thinwire
