// Launches can be captured in a CUDA graph: nothing is allocated but what the graph itself holds,
// nothing waits, and no host memory is read when the graph runs.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "compress/codec_list.h"
#include "tests/compress/values.h"
#include "tests/kernels/devices.h"

namespace thinwire {
namespace {

class CudaGraph : public testing::TestWithParam<const char*> {};
// Codecs of widths need memory between their launches, which is a part of the graph.
INSTANTIATE_TEST_SUITE_P(Of, CudaGraph, testing::Values("int4", "adaptive"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(CudaGraph, ReplaysWhatWasCaptured) {
  const absl::StatusOr<std::shared_ptr<Device>> device = TestDevice("cuda");
  if (!device.ok()) GTEST_SKIP() << device.status().message();
  cudaStream_t handle = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), cudaSuccess);
  const std::unique_ptr<DeviceStream> stream = (*device)->Adopt(handle);
  const CodecSpec spec = *CodecSpec::Parse(GetParam());
  const size_t numel = 100001, bytes = EncodedBytes(spec, numel);
  std::vector<float> gradient = Values(numel, 3), residual(numel), decoded(numel);
  std::vector<uint8_t> wire(bytes);
  OnDevice g(**device, *stream, numel * 4, 0, gradient.data());
  OnDevice r(**device, *stream, numel * 4, 0, residual.data());
  OnDevice w(**device, *stream, bytes), out(**device, *stream, numel * 4);
  ASSERT_TRUE(stream->Synchronize(InTime()).ok());

  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(handle, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_TRUE(stream->IsCapturing());
  stream->backend().Encode(spec, {g.data(), numel}, r.floats(), w.data());
  stream->backend().Decode(spec, w.data(), {out.data(), numel});
  ASSERT_EQ(cudaStreamEndCapture(handle, &graph), cudaSuccess);
  EXPECT_FALSE(stream->IsCapturing());
  cudaGraphExec_t replay = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  for (int step = 0; step < 3; ++step) {
    ASSERT_EQ(cudaGraphLaunch(replay, handle), cudaSuccess);
    ScalarBackend().Encode(spec, {gradient.data(), numel}, residual.data(), wire.data());
    ScalarBackend().Decode(spec, wire.data(), {decoded.data(), numel});
    ASSERT_EQ(w.Read(), wire) << "step " << step;
    const std::vector<uint8_t> got = out.Read();
    ASSERT_EQ(std::memcmp(got.data(), decoded.data(), got.size()), 0) << "step " << step;
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(handle);
}

// The step is counted in the device's memory, by the graph itself.
TEST(CudaGraph, EachReplayDrawsAsTheHostDoesForItsStep) {
  const absl::StatusOr<std::shared_ptr<Device>> device = TestDevice("cuda");
  if (!device.ok()) GTEST_SKIP() << device.status().message();
  cudaStream_t handle = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), cudaSuccess);
  const std::unique_ptr<DeviceStream> stream = (*device)->Adopt(handle);
  const CodecSpec spec = *CodecSpec::Parse("int4:rounding=stochastic");
  const size_t numel = 100001, bytes = EncodedBytes(spec, numel);
  const std::vector<float> gradient = Values(numel, 3);
  std::vector<uint8_t> wire(bytes);
  const uint64_t begin = 0;
  OnDevice g(**device, *stream, numel * 4, 0, gradient.data());
  OnDevice w(**device, *stream, bytes), counter(**device, *stream, sizeof(begin), 0, &begin);
  ASSERT_TRUE(stream->Synchronize(InTime()).ok());

  auto* const count = reinterpret_cast<uint64_t*>(counter.data());
  EncodeExtras extras;
  extras.draws = {.key = 5, .stream = 1000, .first = 256, .counter = count};
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(handle, cudaStreamCaptureModeGlobal), cudaSuccess);
  stream->backend().Encode(spec, {g.data(), numel}, nullptr, w.data(), extras);
  stream->backend().CountUp(count);
  ASSERT_EQ(cudaStreamEndCapture(handle, &graph), cudaSuccess);
  cudaGraphExec_t replay = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  std::vector<float> input = gradient;
  for (uint64_t step = 0; step < 3; ++step) {
    ASSERT_EQ(cudaGraphLaunch(replay, handle), cudaSuccess);
    EncodeExtras of_step;
    of_step.draws = {.key = 5, .stream = 1000 + step, .first = 256};
    ScalarBackend().Encode(spec, {input.data(), numel}, nullptr, wire.data(), of_step);
    ASSERT_EQ(w.Read(), wire) << "step " << step;
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(handle);
}

// Which elements are sent, and how many reach the threshold, the host never hears.
TEST(CudaGraph, TopKReplays) {
  const absl::StatusOr<std::shared_ptr<Device>> device = TestDevice("cuda");
  if (!device.ok()) GTEST_SKIP() << device.status().message();
  cudaStream_t handle = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), cudaSuccess);
  const std::unique_ptr<DeviceStream> stream = (*device)->Adopt(handle);
  const Backend& codecs = stream->backend();
  const CodecSpec spec = *CodecSpec::Parse("topk:density=0.01");
  const size_t numel = 100001, bytes = EncodedBytes(spec, numel);
  std::vector<float> gradient = Residuals(numel, 3), residual(numel), sum(numel);
  std::vector<uint8_t> wire(bytes);
  const float none = 0.0f;
  const size_t words = codecs.EntryScratchWords(spec, numel);
  OnDevice g(**device, *stream, numel * 4, 0, gradient.data());
  OnDevice r(**device, *stream, numel * 4, 0, residual.data());
  OnDevice threshold(**device, *stream, 4, 0, &none), scratch(**device, *stream, words * 4);
  OnDevice w(**device, *stream, bytes), out(**device, *stream, numel * 4);
  ASSERT_TRUE(stream->Synchronize(InTime()).ok());

  EncodeExtras extras;
  extras.threshold = threshold.floats();
  extras.scratch = {reinterpret_cast<uint32_t*>(scratch.data()), words};
  const uint8_t* const wires[] = {w.data()};
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(handle, cudaStreamCaptureModeGlobal), cudaSuccess);
  codecs.Encode(spec, {g.data(), numel}, r.floats(), w.data(), extras);
  codecs.SumEntries(spec, wires, 0.5f, {out.floats(), numel});
  ASSERT_EQ(cudaStreamEndCapture(handle, &graph), cudaSuccess);
  cudaGraphExec_t replay = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  for (int step = 0; step < 4; ++step) {
    ASSERT_EQ(cudaGraphLaunch(replay, handle), cudaSuccess);
    ScalarBackend().Encode(spec, {gradient.data(), numel}, residual.data(), wire.data());
    const uint8_t* const expected[] = {wire.data()};
    ScalarBackend().SumEntries(spec, expected, 0.5f, sum);
    ASSERT_EQ(w.Read(), wire) << "step " << step;
    const std::vector<uint8_t> got = out.Read();
    ASSERT_EQ(std::memcmp(got.data(), sum.data(), got.size()), 0) << "step " << step;
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(handle);
}

}  // namespace
}  // namespace thinwire
