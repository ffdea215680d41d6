// KernelTimer: measures how long work on a GPU takes, and runs the twins to compare it with.
#ifndef THINWIRE_BENCH_KERNEL_TIMER_H_
#define THINWIRE_BENCH_KERNEL_TIMER_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "kernels/cuda_twins.h"

namespace thinwire {

// The memory that a twin accesses for each element: floats read, floats written or added to, codes
// read and written.
struct TwinShape {
  bool reads_gradient, writes_floats, adds, reads_codes, writes_codes;
  int bits;  // per code
};

// Uses the first GPU. A CUDA error ends the program.
class KernelTimer {
 public:
  KernelTimer() {
    Check(cudaSetDevice(0), "no GPU can be used here");
    Check(cudaGetDeviceProperties(&properties_, 0));
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    Check(cudaEventCreate(&begin_));
    Check(cudaEventCreate(&end_));
    flush_bytes_ = size_t{4} * properties_.l2CacheSize;
    Check(cudaMalloc(&flush_, flush_bytes_));
    Check(cudaMemset(flush_, 0, flush_bytes_));
    Check(cudaDeviceSynchronize());
  }
  ~KernelTimer() {
    for (void* memory : {flush_, gradient_, floats_, in_, out_}) cudaFree(memory);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }
  KernelTimer(const KernelTimer&) = delete;
  KernelTimer& operator=(const KernelTimer&) = delete;

  std::string device() const { return properties_.name; }
  void* stream() const { return stream_; }  // queue work here

  // Milliseconds of the work that `work` queues, measured by events. Before it the L2 cache is
  // filled with other data that need not be written back. The work of `prepare` comes before that
  // and is not timed.
  double Time(const std::function<void()>& work, const std::function<void()>& prepare = nullptr) {
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

  // Queue a twin of `numel` elements, or a copy of `bytes` bytes, on memory of the timer.
  void Twin(const TwinShape& shape, size_t numel) {
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
  void Copy(size_t bytes) {
    Reserve(bytes);
    Check(cudaMemcpyAsync(out_, in_, bytes, cudaMemcpyDeviceToDevice, stream_));
  }

 private:
  static void Check(cudaError_t error, const char* what = "CUDA") {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
  }

  void Reserve(size_t bytes) {
    if (bytes <= reserved_) return;
    Check(cudaStreamSynchronize(stream_));
    for (void** memory : {&gradient_, &floats_, &in_, &out_}) {
      Check(cudaFree(*memory));
      Check(cudaMalloc(memory, bytes));
      Check(cudaMemset(*memory, 0x3c, bytes));  // small numbers, not zeros
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

}  // namespace thinwire

#endif  // THINWIRE_BENCH_KERNEL_TIMER_H_
