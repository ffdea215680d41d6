// CurrentDevice: sets the device that a thread's CUDA calls use, for a scope.
#ifndef THINWIRE_KERNELS_CUDA_CONTEXTS_H_
#define THINWIRE_KERNELS_CUDA_CONTEXTS_H_

namespace thinwire::kernels {

// The driver's functions for contexts. Thread-safe; they return error numbers of the driver, which
// the run-time library shares. 0: success.
struct ContextCalls {
  int (*primary)(int ordinal, void** context);  // the device's, shared by all libraries
  int (*current)(void** context);               // the calling thread's; null: none yet
  int (*push)(void* context);
  int (*pop)(void** context);
};

// The functions of the installed driver; each returns an error if there is none.
const ContextCalls& DriverContextCalls();

// Pushes a device's context onto the thread's stack of contexts and pops it again. So a thread that
// never chose a device still has none afterwards. Restoring device 0, the default, by cudaSetDevice
// would create a context there, which takes memory of GPU 0 for each process of the host.
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
