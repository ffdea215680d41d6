// A step on a device allocates no driver memory and loads no kernel: both take long, and may wait
// for all work of the device.
#include <gtest/gtest.h>

#include <barrier>
#include <initializer_list>

#include "absl/strings/str_cat.h"
#include "tests/effort.h"
#include "tests/kernels/watched_device.h"
#include "tests/schedule/device_runs.h"

namespace thinwire {
namespace {

constexpr int kWorld = 2;
constexpr int kCounted = Steps(4);

int Allocations() { return device_counts.allocated + device_counts.pinned + device_counts.pooled; }

// The tensors that a rank reduces: some of many chunks, and several that go at once.
class Model {
 public:
  Model(Engine& engine, const std::shared_ptr<Device>& device,
        std::initializer_list<size_t> sizes = {Elements(9000), 5000, Elements(30001), 300, 301,
                                               1500, 302, 40})
      : engine_(engine) {
    for (const size_t numel : sizes) {
      const std::string key = absl::StrCat("t", numel);
      const std::vector<Segment> halves = {
          {.name = key + ".a", .count = numel / 2, .total = numel / 2},
          {.name = key + ".b", .count = numel - numel / 2, .total = numel - numel / 2}};
      tensors_.push_back(std::make_unique<Tensor>(device, numel * sizeof(float)));
      tensors_.back()->Write(Stored(Gradient(numel, 3, 0, 0), DType::kF32));
      views_.push_back({tensors_.back()->data(), numel});
      buckets_.push_back(*engine.Register({.key = key, .numel = numel, .segments = halves}));
    }
  }

  // Each tensor ends before the next one begins, so a single lane may do all the work.
  void StepOneByOne() {
    for (size_t i = 0; i < views_.size(); ++i) Await(Submit(i, {}));
    engine_.EndStep();
  }
  // All tensors are in flight together.
  void Step(std::vector<uint32_t> absent) {
    std::vector<UsePtr> works;
    for (size_t i = 0; i < views_.size(); ++i) works.push_back(Submit(i, absent));
    engine_.EndStep();
    for (const auto& work : works) Await(work);
  }

 private:
  UsePtr Submit(size_t i, const std::vector<uint32_t>& absent) {
    auto work =
        engine_.Submit(buckets_[i], {.input = views_[i], .output = views_[i], .absent = absent});
    EXPECT_TRUE(work.ok()) << work.status();
    return work.ok() ? *work : nullptr;
  }
  void Await(const UsePtr& work) {
    if (work == nullptr) return;
    EXPECT_TRUE(work->Wait().ok()) << engine_.status();
  }

  Engine& engine_;
  std::vector<std::unique_ptr<Tensor>> tensors_;
  std::vector<TensorView> views_;
  std::vector<std::shared_ptr<const Bucket>> buckets_;
};

class DeviceMemoryTest : public testing::TestWithParam<const char*> {};

// Holds whichever lanes the first step used and however long a thread sleeps meanwhile. Residuals
// and momentum are allocated in the first step.
TEST_P(DeviceMemoryTest, StepsAfterTheFirstAllocateNothing) {
  Options options = SmallChunks(GetParam());
  options.min_bytes = 4096;
  options.momentum = {0.9f, true};
  // On a busy machine ranks seem to be far apart, so chunks would be predicted, which allocates
  // memory. The next test covers that.
  options.predict = Predict::kNever;
  options.timeout = std::chrono::minutes(2);  // many chunks take long on a busy machine
  std::barrier all(kWorld);
  int counted = -1;
  device_counts.cold = 0;
  RunRanks(
      MakeInProcessTransports(kWorld), options,
      [&](int rank, Engine& engine) {
        Model model(engine, WatchedDevice(rank));
        model.StepOneByOne();
        all.arrive_and_wait();
        const int before = Allocations();
        all.arrive_and_wait();
        for (int step = 0; step < kCounted; ++step) {
          model.Step(step % kWorld == rank ? std::vector<uint32_t>{1} : std::vector<uint32_t>());
        }
        all.arrive_and_wait();
        if (rank == 0) counted = Allocations() - before;
        all.arrive_and_wait();
      },
      {WatchedDevice(0), WatchedDevice(1)});
  EXPECT_EQ(counted, 0);
  EXPECT_EQ(device_counts.cold, 0) << "code is loaded when a bucket is registered";
}

// Predicted chunks run beside announced ones. Their memory is allocated with a prediction, not when
// several of them first run together. Tensors of one chunk: StepOneByOne never runs two at once.
TEST_P(DeviceMemoryTest, PredictedChunksAllocateNothing) {
  Options options = SmallChunks(GetParam());
  options.chunk_bytes = 16384;  // room in the window for several tensors
  options.one_hop_bytes = 0;
  options.predict = Predict::kAlways;
  options.lanes = 1;
  options.predicted_lanes = 2;
  options.timeout = std::chrono::minutes(2);
  std::barrier all(kWorld);
  int counted = -1;
  uint64_t predicted = 0;
  RunRanks(MakeInProcessTransports(kWorld), options,
           [&](int rank, Engine& engine) {
             Model model(engine, WatchedDevice(rank), {900, 901, 902, 903, 904, 905, 906, 907});
             for (int step = 0; step < kCounted; ++step) {
               model.StepOneByOne();
               all.arrive_and_wait();
             }
             const int before = Allocations();
             all.arrive_and_wait();
             for (int step = 0; step < kCounted; ++step) {
               model.Step({});
               all.arrive_and_wait();
             }
             if (rank == 0) counted = Allocations() - before;
             if (rank == 0) predicted = engine.stats().predicted_chunks;
             all.arrive_and_wait();
           },
           {WatchedDevice(0), WatchedDevice(1)});
  EXPECT_EQ(counted, 0);
  EXPECT_GT(predicted, 0u);
}

INSTANTIATE_TEST_SUITE_P(Codecs, DeviceMemoryTest,
                         testing::Values("int4", "onebit", "topk:density=0.05,warmup=3", "adaptive",
                                         "adaptive:bits=1,down=int8", "int8:down=adaptive:bits=4"));

}  // namespace
}  // namespace thinwire
