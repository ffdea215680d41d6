// A user that has reserved memory gets it, and slabs are as large as they claim.
#include "transport/staged/slab_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/kernels/watched_device.h"

namespace thinwire {
namespace {

class SlabPoolTest : public testing::TestWithParam<SlabPool::Memory> {
 protected:
  int Allocated() const {
    return GetParam() == SlabPool::Memory::kDevice ? device_counts.allocated.load()
                                                   : device_counts.pinned.load();
  }

  const std::shared_ptr<Device> device_ = WatchedDevice();
  SlabPool pool_{*device_, GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Of, SlabPoolTest,
                         testing::Values(SlabPool::Memory::kDevice, SlabPool::Memory::kPinned));

// Users take the memory that they reserved, repeatedly and in any order.
TEST_P(SlabPoolTest, WhoHasReservedFindsMemory) {
  const size_t needs[] = {100, 5000, 5000, 9000, 100000, 70000, 3, 100000};
  for (int round = 0; round < 2; ++round) {  // reserving again costs nothing
    const int before = Allocated();
    uint64_t user = 0;
    for (const size_t bytes : needs) ASSERT_TRUE(pool_.Reserve(user++, bytes).ok());
    EXPECT_EQ(Allocated() - before, round == 0 ? std::ssize(needs) : 0);
  }
  const int before = Allocated();
  std::minstd_rand random(7);
  std::vector<Slab> taken(std::size(needs));
  for (int i = 0; i < 10000; ++i) {
    Slab& slab = taken[random() % taken.size()];
    if (slab.memory != nullptr) {
      pool_.Give(std::exchange(slab, {}));
    } else {
      const size_t bytes = needs[&slab - taken.data()];
      slab = *pool_.Take(bytes);
      ASSERT_GE(slab.bytes, bytes);
      std::fill_n(slab.memory.get(), slab.bytes, uint8_t{1});
    }
  }
  EXPECT_EQ(Allocated(), before);
}

TEST_P(SlabPoolTest, OthersFindItToo) {
  Slab slab = *pool_.Take(5000);
  const std::unique_ptr<DeviceStream> stream = *device_->MakeStream();
  const std::shared_ptr<DeviceEvent> end = stream->Record();
  slab.used = end;
  const uint8_t* const memory = slab.memory.get();
  pool_.Give(std::move(slab));
  EXPECT_NE(pool_.Take(10000)->memory.get(), memory) << "it is too small";
  const absl::StatusOr<Slab> again = pool_.Take(1);
  EXPECT_EQ(again->memory.get(), memory);
  EXPECT_EQ(again->used, end) << "whose work may go on";
}

}  // namespace
}  // namespace thinwire
