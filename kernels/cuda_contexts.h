// CurrentDevice: the device that a thread's calls of CUDA go to, for a scope.
#ifndef THINWIRE_KERNELS_CUDA_CONTEXTS_H_
#define THINWIRE_KERNELS_CUDA_CONTEXTS_H_

namespace thinwire::kernels {

// The driver's calls about contexts. Thread-safe; what they return are error numbers of the driver,
// which are also those of the run-time library. 0: well.
struct ContextCalls {
  int (*primary)(int ordinal, void** context);  // the device's, which all libraries share
  int (*current)(void** context);               // the calling thread's; null: none yet
  int (*push)(void* context);
  int (*pop)(void** context);
};

// The calls of the driver that is here; each returns an error if there is none.
const ContextCalls& DriverContextCalls();

// A device's context goes onto the thread's stack of contexts and off it again. So a thread that
// never chose a device still has none afterwards. To give back device 0, the default, by
// cudaSetDevice would make a context there, which takes memory of GPU 0 for each process of the
// host.
class CurrentDevice {
 public:
  CurrentDevice(const ContextCalls& calls, int ordinal) : calls_(calls) {
    void* ours = nullptr;
    void* before = nullptr;
    error_ = calls_.primary(ordinal, &ours);
    if (error_ == 0) error_ = calls_.current(&before);
    if (error_ != 0 || before == ours) return;
    error_ = calls_.push(ours);
    pushed_ = error_ == 0;
  }
  ~CurrentDevice() {
    void* ours = nullptr;
    if (pushed_) calls_.pop(&ours);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  int error() const { return error_; }

 private:
  const ContextCalls& calls_;
  int error_ = 0;
  bool pushed_ = false;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_CUDA_CONTEXTS_H_
