// Buckets that are registered once and submitted many times: the bits of calls by name, no
// allocation, and changed descriptions.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "tests/schedule/ranks.h"
#include "transport/in_process/in_process.h"

namespace {

thread_local bool counting = false;
thread_local size_t allocations = 0;

void* Allocate(size_t bytes) {
  if (counting) ++allocations;
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  std::abort();
}

}  // namespace

void* operator new(size_t bytes) { return Allocate(bytes); }
void* operator new[](size_t bytes) { return Allocate(bytes); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace thinwire {
namespace {

constexpr int kSteps = 6;
constexpr size_t kNumel = 5000;

std::shared_ptr<const Bucket> Register(Engine& engine, const BucketRequest& request) {
  auto bucket = engine.Register(request);
  EXPECT_TRUE(bucket.ok()) << bucket.status();
  return bucket.ok() ? *bucket : nullptr;
}

absl::Status Reduce(Engine& engine, const std::shared_ptr<const Bucket>& bucket,
                    std::vector<float>& values) {
  auto work = engine.Submit(bucket, {.input = View(values), .output = View(values)});
  return work.ok() ? (*work)->Wait() : work.status();
}

TEST(Bucket, GivesTheBitsOfCallsByName) {
  for (const int world : {1, 2, 3}) {
    for (const char* codec : {"fp32", "int4", "topk:density=0.02"}) {
      for (const size_t min_bytes : {size_t{0}, size_t{1} << 20}) {
        Options options = SmallChunks(codec);
        options.min_bytes = min_bytes;
        RunRanks(Wire::kInProcess, world, options, [&](int rank, Engine& engine) {
          const auto bucket = Register(engine, {.key = "bucket", .numel = kNumel});
          for (int step = 0; step < kSteps; ++step) {
            std::vector<float> by_name = Gradient(kNumel, 3, rank, step), by_bucket = by_name;
            ASSERT_TRUE(AllReduce(engine, by_name, "named").ok()) << engine.status();
            ASSERT_TRUE(Reduce(engine, bucket, by_bucket).ok()) << engine.status();
            ASSERT_TRUE(by_bucket == by_name) << codec << ", step " << step;
          }
        });
      }
    }
  }
}

// Does not count the allocations by which the control plane sends a frame.
class UncountedControl final : public ControlPlane {
 public:
  explicit UncountedControl(std::unique_ptr<ControlPlane> plane) : plane_(std::move(plane)) {}
  const Membership& members() const override { return plane_->members(); }
  absl::Status Send(int to, const ControlFrame& frame) override {
    const bool before = std::exchange(counting, false);
    absl::Status status = plane_->Send(to, frame);
    counting = before;
    return status;
  }
  absl::StatusOr<ControlMessage> Receive() override { return plane_->Receive(); }
  void Flush(Deadline deadline) override { plane_->Flush(deadline); }
  const std::shared_ptr<Failure>& failure() const override { return plane_->failure(); }

 private:
  const std::unique_ptr<ControlPlane> plane_;
};

std::vector<Transport> UncountedTransports(int world) {
  std::vector<Transport> transports = MakeInProcessTransports(world);
  for (Transport& transport : transports) {
    transport.control = std::make_unique<UncountedControl>(std::move(transport.control));
  }
  return transports;
}

// A submit may still allocate if it has more to do at once than any before it, since the submitting
// thread does part of the rank's other work. So one round of steps without allocations is enough.
TEST(Bucket, ALaterSubmitAllocatesNothing) {
  constexpr int kRounds = 6, kRound = 40;
  for (const char* codec : {"fp32", "int4"}) {
    std::atomic<int> begun = 0;
    RunRanks(UncountedTransports(2), SmallChunks(codec), [&](int rank, Engine& engine) {
      const auto bucket = Register(
          engine, {.key = "a bucket with a name that no small string holds", .numel = kNumel});
      std::vector<float> values = Gradient(kNumel, 4, rank, 0);
      size_t counted = 0, least = SIZE_MAX;
      for (int step = 0; step < kRounds * kRound; ++step) {
        if (step % kRound == 0) counted = 0;
        ++begun;
        while (begun < 2 * (step + 1)) std::this_thread::yield();  // nothing of a step is in flight
        counting = true;
        allocations = 0;
        auto work = engine.Submit(bucket, {.input = View(values), .output = View(values)});
        counting = false;
        counted += allocations;
        engine.EndStep();  // else rank 0 keeps recording the step
        ASSERT_TRUE(work.ok() && (*work)->Wait().ok()) << engine.status();
        // The lane that ended the use holds it a moment longer. References of the engine and of
        // this test remain.
        while (work->use_count() > 2) std::this_thread::yield();
        if ((step + 1) % kRound == 0) least = std::min(least, counted);
      }
      EXPECT_EQ(least, 0u) << "rank " << rank << ", " << codec;
    });
  }
}

// A new description under the same name makes another bucket, and residuals move to it.
TEST(Bucket, ANameDescribedAnewKeepsItsResiduals) {
  constexpr size_t kA = 1500, kB = 2700;
  RunRanks(Wire::kInProcess, 2, SmallChunks("int4"), [](int rank, Engine& engine) {
    const std::vector<Segment> two = {{"a", 0, kA, kA, 0}, {"b", 0, kB, kB, 0}};
    const std::vector<Segment> one = {{"b", 0, kB, kB, 0}};
    const auto first = Register(engine, {.key = "bucket", .numel = kA + kB, .segments = two});
    std::vector<float> values = Gradient(kA + kB, 5, rank, 0);
    ASSERT_TRUE(Reduce(engine, first, values).ok());
    ParameterResidual before, after;
    ASSERT_TRUE(engine.error_feedback().Export("a", &before).ok());

    const auto second = Register(engine, {.key = "bucket", .numel = kB, .segments = one});
    ASSERT_NE(first, second);
    std::vector<float> fewer = Gradient(kB, 5, rank, 1);
    ASSERT_TRUE(Reduce(engine, second, fewer).ok());
    ASSERT_TRUE(engine.error_feedback().Export("a", &after).ok()) << "parked";
    EXPECT_TRUE(after.first == before.first && after.second == before.second);
    EXPECT_NE(before.first, std::vector<float>(kA)) << "the test would show nothing";

    // The older handle still works.
    values = Gradient(kA + kB, 5, rank, 2);
    EXPECT_TRUE(Reduce(engine, first, values).ok()) << engine.status();
  });
}

// No residual is lost when a parameter moves between buckets, or from the mean to the sum.
TEST(Bucket, WhatDescriptionsSendAndKeepAddsUp) {
  constexpr int kWorld = 2;
  std::vector<double> given(kNumel), sent(kNumel), kept(kNumel);
  std::mutex mu;
  RunRanks(Wire::kInProcess, kWorld, SmallChunks("int4"), [&](int rank, Engine& engine) {
    const std::vector<Segment> whole = {{"p", 0, kNumel, kNumel, 0}};
    for (int step = 0; step < 20; ++step) {
      const auto bucket = Register(engine, {.key = step % 2 == 0 ? "even" : "odd",
                                            .numel = kNumel,
                                            .op = step < 10 ? Op::kMean : Op::kSum,
                                            .segments = whole});
      std::vector<float> values = Gradient(kNumel, 6, rank, step);
      {
        const std::lock_guard lock(mu);
        for (size_t i = 0; i < kNumel; ++i) given[i] += values[i];
      }
      ASSERT_TRUE(Reduce(engine, bucket, values).ok()) << engine.status();
      const double ranks = step < 10 ? kWorld : 1;
      for (size_t i = 0; rank == 0 && i < kNumel; ++i) sent[i] += ranks * double{values[i]};
    }
    const std::lock_guard lock(mu);
    ParameterResidual residual;
    ASSERT_TRUE(engine.error_feedback().Export("p", &residual).ok());
    for (size_t i = 0; i < kNumel; ++i) {
      kept[i] += residual.first[i] + residual.second_hop_weight * double{residual.second[i]};
    }
  });
  for (size_t i = 0; i < kNumel; ++i) ASSERT_NEAR(sent[i] + kept[i], given[i], 1e-6) << i;
}

TEST(Bucket, BadUsesAreRefusedAndTheGroupGoesOn) {
  for (const int world : {1, 2}) {
    RunRanks(Wire::kInProcess, world, SmallChunks("int8"), [&](int rank, Engine& engine) {
      EXPECT_TRUE(absl::IsInvalidArgument(engine.Register({.key = "k"}).status()));
      const auto bucket = Register(engine, {.key = "k", .numel = 100});
      std::vector<float> values(100), more(101);
      const auto refused = [&](TensorView input, TensorView output, const std::string& words) {
        const absl::Status status =
            engine.Submit(bucket, {.input = input, .output = output}).status();
        EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
        EXPECT_NE(status.message().find(words), absl::string_view::npos) << status;
      };
      refused(View(more), View(more), "101 elements of f32, expected 100");
      refused({values.data(), 100, DType::kBF16}, {values.data(), 100, DType::kBF16},
              "100 elements of bf16, expected 100 of f32");
      refused(View(values), View(more), "the output has 101");
      refused({}, {}, "the input has 0 elements");
      refused({nullptr, 100}, View(values), "null pointer");
      EXPECT_TRUE(Reduce(engine, bucket, values).ok()) << "rank " << rank;
    });
  }
}

TEST(Bucket, TwiceInFlightIsRefused) {
  RunRanks(Wire::kInProcess, 2, SmallChunks("int8"), [](int rank, Engine& engine) {
    const auto bucket = Register(engine, {.key = "k", .numel = kNumel});
    std::vector<float> a(kNumel), b(kNumel), gate(1);
    if (rank == 1) {
      ASSERT_TRUE(AllReduce(engine, gate, "gate").ok());
    }
    auto first = engine.Submit(bucket, {.input = View(a), .output = View(a)});
    ASSERT_TRUE(first.ok());
    if (rank == 0) {  // rank 1 has not submitted it yet
      const absl::Status twice =
          engine.Submit(bucket, {.input = View(b), .output = View(b)}).status();
      EXPECT_TRUE(absl::IsInvalidArgument(twice)) << twice;
      ASSERT_TRUE(AllReduce(engine, gate, "gate").ok());
    }
    EXPECT_TRUE((*first)->Wait().ok());
  });
}

}  // namespace
}  // namespace thinwire
