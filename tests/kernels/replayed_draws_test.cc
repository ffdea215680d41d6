// Launches that are queued once more as they were, which is what a replayed CUDA graph does: on the
// device of CPU threads (cuda_graph_test.cc has true graphs). Stochastic rounding draws anew in
// each replay, as the host does for the same step.
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "compress/philox.h"
#include "tests/compress/values.h"
#include "tests/kernels/devices.h"

namespace thinwire {
namespace {

using kernels::HostDeviceApi;

std::vector<std::function<void()>> captured;

template <typename Launch>
using Queue = int (*)(int, const Launch*, void*);

template <typename Launch, Queue<Launch> kernels::DeviceApi::*kQueue>
int Capture(int ordinal, const Launch* launch, void* stream) {
  captured.push_back([=, copy = *launch] { (HostDeviceApi().*kQueue)(ordinal, &copy, stream); });
  return 0;
}

// A device whose launches wait for a replay.
std::shared_ptr<Device> CapturingDevice() {
  static const kernels::DeviceApi api = [] {
    kernels::DeviceApi capturing = HostDeviceApi();
    capturing.encode = Capture<kernels::EncodeLaunch, &kernels::DeviceApi::encode>;
    capturing.reduce = Capture<kernels::ReduceLaunch, &kernels::DeviceApi::reduce>;
    capturing.decode = Capture<kernels::DecodeLaunch, &kernels::DeviceApi::decode>;
    capturing.count_up = [](int ordinal, uint64_t* counter, void* stream) {
      captured.push_back([=] { HostDeviceApi().count_up(ordinal, counter, stream); });
      return 0;
    };
    return capturing;
  }();
  captured.clear();
  return MakeDevice(api, 0, "capturing:0");
}

void Replay() {
  for (const auto& launch : captured) launch();
}

constexpr size_t kNumel = 10001;
constexpr uint64_t kFirstStep = (uint64_t{1} << 32) - 2;  // its low word overflows on the way
constexpr int kReplays = 4;

Draws DrawsOf(uint64_t step, const uint64_t* counter = nullptr) {
  return {.key = 7, .stream = step, .first = 512, .counter = counter};
}

class Replays : public testing::TestWithParam<const char*> {
 protected:
  const CodecSpec spec_ = *CodecSpec::Parse(GetParam());
  const std::shared_ptr<Device> device_ = CapturingDevice();
  const std::unique_ptr<DeviceStream> stream_ = *device_->MakeStream();
  const std::vector<float> values_ = Values(kNumel, 3);
  std::vector<uint8_t> wire_ = std::vector<uint8_t>(EncodedBytes(spec_, kNumel));
  const uint64_t zero_ = 0;
  OnDevice gradient_{*device_, *stream_, kNumel * sizeof(float), 0, values_.data()};
  OnDevice on_device_{*device_, *stream_, wire_.size()};
  OnDevice counter_{*device_, *stream_, sizeof(zero_), 0, &zero_};
  uint64_t* const count_ = reinterpret_cast<uint64_t*>(counter_.data());
};

TEST_P(Replays, EncodeWithTheDrawsOfTheirStep) {
  EncodeExtras extras;
  extras.draws = DrawsOf(kFirstStep, count_);
  stream_->backend().Encode(spec_, {gradient_.data(), kNumel}, nullptr, on_device_.data(), extras);
  stream_->backend().CountUp(count_);
  for (uint64_t step = kFirstStep; step < kFirstStep + kReplays; ++step) {
    Replay();
    extras.draws = DrawsOf(step);
    std::vector<float> input = values_;
    ScalarBackend().Encode(spec_, {input.data(), kNumel}, nullptr, wire_.data(), extras);
    EXPECT_EQ(on_device_.Read(), wire_) << "step " << step;
  }
}

TEST_P(Replays, ReduceWithTheDrawsOfTheirStep) {
  OnDevice out{*device_, *stream_, kNumel * sizeof(float)};
  const uint8_t* const own[] = {nullptr};
  ReduceArgs args = {.up = spec_,
                     .down = spec_,
                     .wires = own,
                     .own = {gradient_.data(), kNumel},
                     .scale = 0.5f,
                     .residual = nullptr,
                     .out = {out.data(), kNumel},
                     .wire_out = on_device_.data(),
                     .draws = DrawsOf(kFirstStep, count_)};
  stream_->backend().Reduce(args);
  stream_->backend().CountUp(count_);
  std::vector<float> input = values_, decoded(kNumel);
  args.own = {input.data(), kNumel};
  args.out = {decoded.data(), kNumel};
  args.wire_out = wire_.data();
  for (uint64_t step = kFirstStep; step < kFirstStep + kReplays; ++step) {
    Replay();
    args.draws = DrawsOf(step);
    ScalarBackend().Reduce(args);
    EXPECT_EQ(on_device_.Read(), wire_) << "step " << step;
  }
}

// An allreduce of two ranks in one graph: rank 1 sends its gradient to rank 0, which owns it. Each
// rank has a counter of its own.
TEST_P(Replays, RanksHoldTheSameBits) {
  OnDevice sent{*device_, *stream_, wire_.size()};
  OnDevice out_0{*device_, *stream_, kNumel * sizeof(float)};
  OnDevice out_1{*device_, *stream_, kNumel * sizeof(float)};
  OnDevice counter_1{*device_, *stream_, sizeof(zero_), 0, &zero_};
  auto* const count_1 = reinterpret_cast<uint64_t*>(counter_1.data());
  const Backend& codecs = stream_->backend();
  EncodeExtras extras;
  extras.draws = {.key = 2, .stream = kFirstStep, .first = 0, .counter = count_1};
  codecs.Encode(spec_, {gradient_.data(), kNumel}, nullptr, sent.data(), extras);
  const uint8_t* const wires[] = {nullptr, sent.data()};
  codecs.Reduce({.up = spec_,
                 .down = spec_,
                 .wires = wires,
                 .own = {gradient_.data(), kNumel},
                 .scale = 0.5f,
                 .residual = nullptr,
                 .out = {out_0.data(), kNumel},
                 .wire_out = on_device_.data(),
                 .draws = DrawsOf(kFirstStep, count_)});
  codecs.Decode(spec_, on_device_.data(), {out_1.data(), kNumel});
  codecs.CountUp(count_);
  codecs.CountUp(count_1);
  std::vector<std::vector<uint8_t>> results;
  for (int step = 0; step < kReplays; ++step) {
    Replay();
    results.push_back(out_0.Read());
    EXPECT_EQ(results.back(), out_1.Read()) << "step " << step;
    for (int before = 0; before < step; ++before) {
      EXPECT_NE(results[before], results.back()) << "steps " << before << " and " << step;
    }
  }
}

// A counter of the host's own, so that a program without a GPU runs the same steps.
TEST_P(Replays, TheHostCountsAsWell) {
  std::vector<uint8_t> counted(wire_.size());
  std::vector<float> input = values_;
  uint64_t counter = 0;
  EncodeExtras extras;
  for (uint64_t step = kFirstStep; step < kFirstStep + kReplays; ++step) {
    extras.draws = DrawsOf(kFirstStep, &counter);
    CpuBackend().Encode(spec_, {input.data(), kNumel}, nullptr, counted.data(), extras);
    CpuBackend().CountUp(&counter);
    extras.draws = DrawsOf(step);
    ScalarBackend().Encode(spec_, {input.data(), kNumel}, nullptr, wire_.data(), extras);
    EXPECT_EQ(counted, wire_) << "step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, Replays,
                         testing::Values("int8:rounding=stochastic", "int4:rounding=stochastic"));

}  // namespace
}  // namespace thinwire
