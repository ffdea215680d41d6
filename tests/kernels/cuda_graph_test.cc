// Launches can be captured in a CUDA graph: only the graph itself holds memory, nothing waits, and
// no host memory is read when the graph runs.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <functional>

#include "compress/codec_list.h"
#include "tests/compress/values.h"
#include "tests/kernels/devices.h"

namespace thinwire {
namespace {

class CudaGraph : public testing::Test {
 protected:
  void SetUp() override {
    const absl::StatusOr<std::shared_ptr<Device>> device = TestDevice("cuda");
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    device_ = *device;
    ASSERT_EQ(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking), cudaSuccess);
    stream_ = device_->Adopt(handle_);
  }
  void TearDown() override {
    if (replay_ != nullptr) cudaGraphExecDestroy(replay_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
    if (handle_ != nullptr) cudaStreamDestroy(handle_);
  }

  // Captures the work that `launch` queues on the stream in a graph.
  void Capture(const std::function<void()>& launch) {
    ASSERT_TRUE(stream_->Synchronize(InTime()).ok());
    ASSERT_EQ(cudaStreamBeginCapture(handle_, cudaStreamCaptureModeGlobal), cudaSuccess);
    EXPECT_TRUE(stream_->IsCapturing());
    launch();
    ASSERT_EQ(cudaStreamEndCapture(handle_, &graph_), cudaSuccess);
    EXPECT_FALSE(stream_->IsCapturing());
    ASSERT_EQ(cudaGraphInstantiate(&replay_, graph_, 0), cudaSuccess);
  }
  void Replay() { ASSERT_EQ(cudaGraphLaunch(replay_, handle_), cudaSuccess); }

  std::shared_ptr<Device> device_;
  cudaStream_t handle_ = nullptr;
  std::unique_ptr<DeviceStream> stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t replay_ = nullptr;
};

class CudaGraphOf : public CudaGraph, public testing::WithParamInterface<const char*> {};
// Codecs with widths need memory between their launches; it is part of the graph.
INSTANTIATE_TEST_SUITE_P(All, CudaGraphOf, testing::Values("int4", "adaptive"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(CudaGraphOf, ReplaysWhatWasCaptured) {
  const CodecSpec spec = *CodecSpec::Parse(GetParam());
  const size_t numel = 100001, bytes = EncodedBytes(spec, numel);
  std::vector<float> gradient = Values(numel, 3), residual(numel), decoded(numel);
  std::vector<uint8_t> wire(bytes);
  OnDevice g(*device_, *stream_, numel * 4, 0, gradient.data());
  OnDevice r(*device_, *stream_, numel * 4, 0, residual.data());
  OnDevice w(*device_, *stream_, bytes), out(*device_, *stream_, numel * 4);

  Capture([&] {
    stream_->backend().Encode(spec, {g.data(), numel}, r.floats(), w.data());
    stream_->backend().Decode(spec, w.data(), {out.data(), numel});
  });
  for (int step = 0; step < 3; ++step) {
    Replay();
    ScalarBackend().Encode(spec, {gradient.data(), numel}, residual.data(), wire.data());
    ScalarBackend().Decode(spec, wire.data(), {decoded.data(), numel});
    ASSERT_EQ(w.Read(), wire) << "step " << step;
    const std::vector<uint8_t> got = out.Read();
    ASSERT_EQ(std::memcmp(got.data(), decoded.data(), got.size()), 0) << "step " << step;
  }
}

// The host never learns which elements are sent, or how many reach the threshold.
TEST_F(CudaGraph, TopKReplays) {
  const Backend& codecs = stream_->backend();
  const CodecSpec spec = *CodecSpec::Parse("topk:density=0.01");
  const size_t numel = 100001, bytes = EncodedBytes(spec, numel);
  std::vector<float> gradient = Residuals(numel, 3), residual(numel), sum(numel);
  std::vector<uint8_t> wire(bytes);
  const float none = 0.0f;
  OnDevice g(*device_, *stream_, numel * 4, 0, gradient.data());
  OnDevice r(*device_, *stream_, numel * 4, 0, residual.data());
  OnDevice threshold(*device_, *stream_, 4, 0, &none);
  OnDevice w(*device_, *stream_, bytes), out(*device_, *stream_, numel * 4);

  const EncodeArgs args{.gradient = {g.data(), numel},
                        .residual = r.floats(),
                        .wire = w.data(),
                        .threshold = threshold.floats()};
  const uint8_t* const wires[] = {w.data()};
  Capture([&] {
    codecs.Encode(spec, args);
    codecs.SumEntries(spec, wires, 0.5f, {out.floats(), numel});
  });
  for (int step = 0; step < 4; ++step) {
    Replay();
    ScalarBackend().Encode(spec, {gradient.data(), numel}, residual.data(), wire.data());
    const uint8_t* const expected[] = {wire.data()};
    ScalarBackend().SumEntries(spec, expected, 0.5f, sum);
    ASSERT_EQ(w.Read(), wire) << "step " << step;
    const std::vector<uint8_t> got = out.Read();
    ASSERT_EQ(std::memcmp(got.data(), sum.data(), got.size()), 0) << "step " << step;
  }
}

}  // namespace
}  // namespace thinwire
