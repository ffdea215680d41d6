// Allreduces of tensors on the host or on devices, with the results and the state that they leave.
#ifndef THINWIRE_TESTS_SCHEDULE_DEVICE_RUNS_H_
#define THINWIRE_TESTS_SCHEDULE_DEVICE_RUNS_H_

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/effort.h"
#include "tests/kernels/devices.h"
#include "tests/schedule/ranks.h"
#include "transport/in_process/in_process.h"

namespace thinwire {

inline constexpr int kSteps = Steps(4);

// A rank's tensor: on the host, or on a device, where the default stream uses it.
class Tensor {
 public:
  Tensor(std::shared_ptr<Device> device, size_t bytes) : device_(std::move(device)), host_(bytes) {
    if (device_ == nullptr) return;
    stream_ = device_->Adopt(nullptr);
    memory_ = *device_->Allocate(bytes);
    pinned_ = *device_->AllocatePinned(bytes);
  }
  void* data() { return device_ == nullptr ? host_.data() : memory_.get(); }

  void Write(const std::vector<uint8_t>& bytes) {
    if (device_ == nullptr) {
      host_ = bytes;
      return;
    }
    ASSERT_TRUE(stream_->Synchronize(InTime()).ok());
    std::copy(bytes.begin(), bytes.end(), pinned_.get());
    stream_->Copy(memory_.get(), pinned_.get(), bytes.size());
  }
  std::vector<uint8_t> Read() {
    if (device_ == nullptr) return host_;
    stream_->Copy(pinned_.get(), memory_.get(), host_.size());
    EXPECT_TRUE(stream_->Synchronize(InTime()).ok());
    return {pinned_.get(), pinned_.get() + host_.size()};
  }

 private:
  const std::shared_ptr<Device> device_;
  std::vector<uint8_t> host_;
  std::unique_ptr<DeviceStream> stream_;
  DeviceMemory pinned_, memory_;  // in this order: releasing memory_ waits for copies of both
};

struct Case {
  int world = 2;
  size_t numel = Elements(20000);
  DType dtype = DType::kF32;
  std::vector<Segment> segments = {};
  bool absent = false;  // the first segment is absent on another rank in every step
};

// By rank: the result of each of kSteps allreduces, then residuals and momentum.
using History = std::vector<std::vector<std::vector<uint8_t>>>;
inline History Reduce(const Options& options, const Case& run,
                      const std::vector<std::shared_ptr<Device>>& devices,
                      std::vector<Transport> transports) {
  History history(run.world);
  RunRanks(
      std::move(transports), options,
      [&](int rank, Engine& engine) {
        Tensor tensor(devices.empty() ? nullptr : devices[rank], run.numel * SizeOf(run.dtype));
        for (int step = 0; step < kSteps; ++step) {
          tensor.Write(Stored(Gradient(run.numel, 11, rank, step), run.dtype));
          const TensorView view{tensor.data(), run.numel, run.dtype};
          const std::vector<uint32_t> absent(run.absent && step % run.world == rank ? 1 : 0, 0);
          auto work = engine.Start({.input = view,
                                    .output = view,
                                    .key = "t",
                                    .segments = run.segments,
                                    .absent = absent});
          ASSERT_TRUE(work.ok()) << work.status();
          const absl::Status status = (*work)->Wait();
          ASSERT_TRUE(status.ok()) << status;
          history[rank].push_back(tensor.Read());
        }
        for (const ErrorFeedback::Known& parameter : engine.error_feedback().parameters()) {
          ParameterResidual kept;
          ASSERT_TRUE(engine.error_feedback().Export(parameter.name, &kept).ok());
          for (const auto* floats :
               {&kept.first, &kept.second, &kept.arrays[std::string(kMomentum)]}) {
            history[rank].push_back(Stored(*floats, DType::kF32));
          }
        }
      },
      devices);
  return history;
}

inline History Reduce(const Options& options, const Case& run,
                      const std::vector<std::shared_ptr<Device>>& devices) {
  return Reduce(options, run, devices, MakeInProcessTransports(run.world));
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_SCHEDULE_DEVICE_RUNS_H_
