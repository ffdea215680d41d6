#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "bench/kernel_timer.h"
#include "kernels/cuda_twins.h"

namespace thinwire {
namespace {

// A benchmark has nobody to report to.
void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

class CudaKernelTimer final : public KernelTimer {
 public:
  CudaKernelTimer() {
    Check(cudaGetDeviceProperties(&properties_, 0));
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    Check(cudaEventCreate(&begin_));
    Check(cudaEventCreate(&end_));
    flush_bytes_ = size_t{4} * properties_.l2CacheSize;
    Check(cudaMalloc(&flush_, flush_bytes_));
    Check(cudaMemset(flush_, 0, flush_bytes_));
    Check(cudaDeviceSynchronize());
  }
  ~CudaKernelTimer() override {
    for (void* memory : {flush_, gradient_, floats_, in_, out_}) cudaFree(memory);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }

  std::string device() const override { return properties_.name; }
  void* stream() const override { return stream_; }

  double Time(const std::function<void()>& work, const std::function<void()>& prepare) override {
    if (prepare) prepare();
    Check(kernels::LaunchRead(flush_, flush_bytes_, stream_));
    Check(cudaEventRecord(begin_, stream_));
    work();
    Check(cudaEventRecord(end_, stream_));
    Check(cudaEventSynchronize(end_));
    float milliseconds = 0.0f;
    Check(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return milliseconds;
  }

  void Twin(const TwinShape& shape, size_t numel) override {
    Reserve(numel * sizeof(float));
    kernels::TwinArgs args{};
    if (shape.reads_gradient) args.gradient = static_cast<const float*>(gradient_);
    if (shape.writes_floats) args.floats = static_cast<float*>(floats_);
    args.add = shape.adds;
    if (shape.reads_codes) args.codes_in = static_cast<const uint8_t*>(in_);
    if (shape.writes_codes) args.codes_out = static_cast<uint8_t*>(out_);
    args.bits = shape.bits;
    args.numel = numel;
    Check(kernels::LaunchTwin(args, stream_));
  }

  void Copy(size_t bytes) override {
    Reserve(bytes);
    Check(cudaMemcpyAsync(out_, in_, bytes, cudaMemcpyDeviceToDevice, stream_));
  }

 private:
  void Reserve(size_t bytes) {
    if (bytes <= reserved_) return;
    Check(cudaStreamSynchronize(stream_));
    for (void** memory : {&gradient_, &floats_, &in_, &out_}) {
      Check(cudaFree(*memory));
      Check(cudaMalloc(memory, bytes));
      Check(cudaMemset(*memory, 0x3c, bytes));  // small numbers, no zeros
    }
    Check(cudaDeviceSynchronize());
    reserved_ = bytes;
  }

  cudaDeviceProp properties_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  void *flush_ = nullptr, *gradient_ = nullptr, *floats_ = nullptr, *in_ = nullptr, *out_ = nullptr;
  size_t flush_bytes_ = 0, reserved_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<KernelTimer>> MakeKernelTimer() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    const char* const why = error == cudaSuccess ? "there is none" : cudaGetErrorString(error);
    return absl::UnimplementedError(absl::StrCat("no GPU can be used here: ", why));
  }
  Check(cudaSetDevice(0));
  return std::make_unique<CudaKernelTimer>();
}

}  // namespace thinwire
