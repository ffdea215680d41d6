// Properties of exchanges of device memory beyond the contract of data planes (data_plane_test.cc):
// their cost, what overlaps, and that a thread waiting for a device is woken by an abort. The host
// devices' memory is normal memory, so vectors serve as blocks.
#include "transport/staged/staged.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <thread>
#include <vector>

#include "tests/kernels/devices.h"
#include "tests/kernels/watched_device.h"
#include "transport/in_process/in_process.h"

namespace thinwire {
namespace {

// One rank of a group.
struct Rank {
  Rank(Transport host, std::shared_ptr<Device> its_device)
      : transport(std::move(host)), device(std::move(its_device)) {}

  Transport transport;
  std::shared_ptr<Device> device;
  std::unique_ptr<DeviceStream> stream = *device->MakeStream();
  SlabPool slabs{*device, SlabPool::Memory::kPinned};
  std::unique_ptr<Staged> plane =
      *Staged::Make(*transport.data, *device, *stream, slabs, std::chrono::seconds(60));
};

using Ranks = std::vector<std::unique_ptr<Rank>>;

Ranks MakeRanks(int size, const kernels::DeviceApi& api = WatchedDeviceApi()) {
  Ranks ranks;
  for (Transport& transport : MakeInProcessTransports(size)) {
    const int ordinal = static_cast<int>(ranks.size());
    ranks.push_back(std::make_unique<Rank>(std::move(transport), MakeDevice(api, ordinal, "test")));
  }
  return ranks;
}

// A rank's blocks, one per rank, contiguous in memory.
struct Blocks {
  Blocks(size_t ranks, size_t bytes, uint8_t value) : block(bytes), memory(ranks * bytes, value) {}
  std::vector<Bytes> Each() const {
    std::vector<Bytes> each;
    for (size_t at = 0; at < memory.size(); at += block) each.push_back({&memory[at], block});
    return each;
  }
  std::vector<MutableBytes> EachToWrite() {
    std::vector<MutableBytes> each;
    for (size_t at = 0; at < memory.size(); at += block) each.push_back({&memory[at], block});
    return each;
  }

  const size_t block;
  std::vector<uint8_t> memory;
};

void AwaitCopiesQueued(int count) {
  while (device_counts.copies_queued < count) std::this_thread::yield();
}

TEST(Staged, AnExchangeTakesOneSlabAndCopiesNeighboursTogether) {
  constexpr int kRanks = 3;
  std::vector<Blocks> out, in;
  for (uint8_t r = 0; r < kRanks; ++r) {
    out.emplace_back(kRanks, 128, r);
    in.emplace_back(kRanks, 128, 9);
  }
  const Ranks ranks = MakeRanks(kRanks);
  const int pinned = device_counts.pinned, copies = device_counts.copies;
  const auto exchange = [&](uint64_t tag, auto blocks_of) {
    std::vector<std::unique_ptr<Exchange>> exchanges;
    for (int r = 0; r < kRanks; ++r) {
      exchanges.push_back(ranks[r]->plane->Start(tag, blocks_of(r), in[r].EachToWrite()));
    }
    for (int r = 0; r < kRanks; ++r) {
      EXPECT_TRUE(exchanges[r]->Wait(InTime()).ok());
      EXPECT_TRUE(ranks[r]->stream->Synchronize(InTime()).ok());
    }
  };
  exchange(1, [&](int r) { return out[r].Each(); });
  EXPECT_EQ(device_counts.pinned - pinned, kRanks);
  // Ranks 0 and 2 send contiguous blocks; rank 1's own block lies between those that it sends.
  EXPECT_EQ(device_counts.copies - copies, 2 * (1 + 2 + 1));
  EXPECT_EQ(in[0].memory[0], 9);
  EXPECT_EQ(in[0].memory[128], 1);
  EXPECT_EQ(in[1].memory[383], 2);

  // A gather needs less memory, and copies its one block to the host once.
  exchange(2, [&](int r) { return std::vector<Bytes>(kRanks, out[r].Each()[0]); });
  EXPECT_EQ(device_counts.pinned - pinned, kRanks);
  EXPECT_EQ(device_counts.copies - copies, 8 + 3 + 4);
}

TEST(Staged, WhatIsReceivedDoesNotWaitForWhatIsToBeSent) {
  Blocks out(2, 64, 1), in(2, 64, 0), later(2, 64, 0);
  const Ranks ranks = MakeRanks(2);
  Rank& rank = *ranks[0];
  const auto mine = rank.plane->Start(1, out.Each(), in.EachToWrite());
  const auto other = ranks[1]->plane->Start(1, out.Each(), in.EachToWrite());
  const int queued = device_counts.copies_queued, copies = device_counts.copies;
  std::future<std::unique_ptr<Exchange>> next;
  {
    const Held held(*rank.stream);  // like a slow codec
    next = std::async(std::launch::async,
                      [&] { return rank.plane->Start(2, out.Each(), later.EachToWrite()); });
    AwaitCopiesQueued(queued + 1);
    EXPECT_TRUE(mine->Wait(InTime()).ok());
    const auto end = InTime();
    while (device_counts.copies == copies && Clock::now() < end) std::this_thread::yield();
    EXPECT_EQ(device_counts.copies - copies, 1);
  }
  EXPECT_TRUE(other->Wait(InTime()).ok());
  next.get().reset();  // fails the plane, which ends the rest
  EXPECT_TRUE(rank.stream->Synchronize(InTime()).ok());
  EXPECT_EQ(in.memory[64], 1);
}

// Copies from or to an address wait until the gate opens.
struct Gate {
  explicit Gate(const void* address) {
    at = address;
    here = this;
  }
  ~Gate() { at = nullptr; }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  absl::Notification open;

  static inline const void* at = nullptr;
  static inline Gate* here = nullptr;
};

const kernels::DeviceApi& GatedDeviceApi() {
  static const kernels::DeviceApi gated = [] {
    kernels::DeviceApi api = WatchedDeviceApi();
    api.copy = [](int ordinal, void* to, const void* from, size_t bytes, void* stream) {
      if (Gate::at != nullptr && (to == Gate::at || from == Gate::at)) {
        kernels::QueueOnHostDevice(stream,
                                   [gate = Gate::here] { gate->open.WaitForNotification(); });
      }
      return WatchedDeviceApi().copy(ordinal, to, from, bytes, stream);
    };
    return api;
  }();
  return gated;
}

// Copies to the device may still be queued when the next exchange, of another layout, gets the
// slab.
TEST(Staged, ASlabIsWrittenAgainWhenItHasBeenRead) {
  Blocks few(2, 64, 1), many(2, 4096, 2), in_many(2, 4096, 0), in_few(2, 64, 0);
  Blocks other_bytes(2, 4096, 3);
  Blocks of_the_other(2, 64, 0), of_the_other_later(2, 4096, 0);
  Gate gate(&in_many.memory[4096]);
  const Ranks ranks = MakeRanks(2, GatedDeviceApi());
  const auto step = [&](Rank& rank, uint64_t tag, Blocks& out, Blocks& in) {
    return rank.plane->Start(tag, out.Each(), in.EachToWrite());
  };
  auto mine = step(*ranks[0], 1, few, in_many), other = step(*ranks[1], 1, many, of_the_other);
  EXPECT_TRUE(mine->Wait(InTime()).ok() && other->Wait(InTime()).ok());
  mine.reset();
  auto next =
      std::async(std::launch::async, [&] { return step(*ranks[0], 2, other_bytes, in_few); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // enough for an error to show
  gate.open.Notify();
  other = step(*ranks[1], 2, few, of_the_other_later);
  mine = next.get();
  EXPECT_TRUE(mine->Wait(InTime()).ok() && other->Wait(InTime()).ok());
  for (const auto& rank : ranks) EXPECT_TRUE(rank->stream->Synchronize(InTime()).ok());
  std::vector<uint8_t> expected(8192, 0);
  std::fill(expected.begin() + 4096, expected.end(), 2);
  EXPECT_EQ(in_many.memory, expected);
}

TEST(Staged, AnAbortEndsTheWaitForTheDevice) {
  Blocks out(2, 64, 1), in(2, 64, 0);
  const Ranks ranks = MakeRanks(2);
  const Held held(*ranks[0]->stream);
  const int queued = device_counts.copies_queued;
  auto start = std::async(std::launch::async,
                          [&] { return ranks[0]->plane->Start(1, out.Each(), in.EachToWrite()); });
  AwaitCopiesQueued(queued + 1);
  ranks[0]->transport.data->Abort(absl::CancelledError("the user ended it"));
  EXPECT_EQ(start.get()->Wait(InTime()), absl::CancelledError("the user ended it"));
}

// A caller that gets the failure may free the tensor.
TEST(Staged, AfterAnAbortTheStreamOutwaitsTheCopies) {
  Blocks out(2, 64, 1), in(2, 64, 0);
  Gate gate(&out.memory[64]);
  const Ranks ranks = MakeRanks(2, GatedDeviceApi());
  Rank& rank = *ranks[0];
  const int queued = device_counts.copies_queued;
  auto start = std::async(std::launch::async,
                          [&] { return rank.plane->Start(1, out.Each(), in.EachToWrite()); });
  AwaitCopiesQueued(queued + 1);
  rank.transport.data->Abort(absl::CancelledError("the user ended it"));
  start.get().reset();
  const absl::Status early = rank.stream->Synchronize(Clock::now() + std::chrono::milliseconds(20));
  EXPECT_TRUE(absl::IsDeadlineExceeded(early)) << early;
  gate.open.Notify();
  EXPECT_TRUE(rank.stream->Synchronize(InTime()).ok());
}

}  // namespace
}  // namespace thinwire
