// Ranks as threads of one process, each with its own device, over the fake NCCL.
#ifndef THINWIRE_TESTS_TRANSPORT_CONNECT_NCCL_H_
#define THINWIRE_TESTS_TRANSPORT_CONNECT_NCCL_H_

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "schedule/join/agree.h"
#include "tests/host_device/host_device.h"
#include "tests/transport/fake_nccl/fake_nccl.h"
#include "transport/in_process/in_process.h"
#include "transport/nccl/nccl.h"

namespace thinwire {

// Returns the controls of a copy of the fake library, which is loaded if necessary.
inline FakeNccl& ControlsOf(const std::string& path) {
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  FakeNccl& fake = *reinterpret_cast<FakeNccl* (*)()>(dlsym(handle, kFakeNcclSymbol))();
  fake.queue = [](void* stream, void (*work)(void*), void* argument) {
    kernels::QueueOnHostDevice(stream, [=] { work(argument); });
  };
  return fake;
}

inline FakeNccl& Fake() { return ControlsOf(THINWIRE_FAKE_NCCL); }

// Changes one control of the fake for a scope.
class FakeBehaves {
 public:
  FakeBehaves(std::atomic<int> FakeNccl::*how, int value)
      : how_(Fake().*how), before_(how_.exchange(value)) {}
  ~FakeBehaves() { how_ = before_; }
  FakeBehaves(const FakeBehaves&) = delete;
  FakeBehaves& operator=(const FakeBehaves&) = delete;

 private:
  std::atomic<int>& how_;
  const int before_;
};

// Returns the device of a rank, which no other rank uses.
inline std::shared_ptr<Device> DeviceOfRank(int rank) {
  return MakeDevice(kernels::HostDeviceApi(), rank, "host:" + std::to_string(rank));
}

inline std::vector<std::shared_ptr<Device>> DevicesOfRanks(int world) {
  std::vector<std::shared_ptr<Device>> devices;
  for (int r = 0; r < world; ++r) devices.push_back(DeviceOfRank(r));
  return devices;
}

inline Board NcclBoardOf(Transport& transport, Clock::duration patience) {
  return {"NCCL",
          transport.members(),
          transport,
          0,
          Clock::now() + patience,
          std::chrono::duration_cast<std::chrono::milliseconds>(patience)};
}

inline NcclOptions NcclOptionsOf(Transport& transport,
                                 Clock::duration patience = std::chrono::seconds(20),
                                 const std::string& library = THINWIRE_FAKE_NCCL) {
  const Board board = NcclBoardOf(transport, patience);
  return {.members = board.members,
          .tell = TellerOf(board),
          .control = *transport.control,
          .library = library,
          .deadline = board.deadline,
          .device = DeviceOfRank(transport.members().rank)};
}

// Connects all ranks, on a thread per rank; returns the results by rank.
inline std::vector<absl::StatusOr<std::unique_ptr<StreamPlane>>> TryNccl(
    int world, Clock::duration patience = std::chrono::seconds(20),
    const std::string& library = THINWIRE_FAKE_NCCL) {
  ControlsOf(library);
  std::vector<Transport> meeting = MakeInProcessTransports(world);
  std::vector<absl::StatusOr<std::unique_ptr<StreamPlane>>> planes(world);
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back(
        [&, r] { planes[r] = ConnectNccl(NcclOptionsOf(meeting[r], patience, library)); });
  }
  for (std::thread& thread : threads) thread.join();
  return planes;
}

inline std::vector<std::unique_ptr<StreamPlane>> ConnectNcclPlanes(int world) {
  std::vector<std::unique_ptr<StreamPlane>> planes;
  for (auto& plane : TryNccl(world)) {
    EXPECT_TRUE(plane.ok()) << plane.status();
    planes.push_back(plane.ok() ? *std::move(plane) : nullptr);
  }
  return planes;
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_CONNECT_NCCL_H_
