// KernelTimer: how long work on a GPU takes, and the twins to compare it with.
#ifndef THINWIRE_BENCH_KERNEL_TIMER_H_
#define THINWIRE_BENCH_KERNEL_TIMER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace thinwire {

// Memory that a twin moves for each element: floats read, floats written or added to, codes read
// and written.
struct TwinShape {
  bool reads_gradient, writes_floats, adds, reads_codes, writes_codes;
  int bits;  // of a code
};

class KernelTimer {
 public:
  virtual ~KernelTimer() = default;
  virtual std::string device() const = 0;  // its name
  virtual void* stream() const = 0;        // that work is queued on

  // Milliseconds of what `work` queues, by events. The L2 cache holds other data before,
  // none of which has to be written. What `prepare` queues comes before, and is not timed.
  virtual double Time(const std::function<void()>& work,
                      const std::function<void()>& prepare = nullptr) = 0;

  // Queue a twin of `numel` elements, or a copy of `bytes`, on memory of the timer's own.
  virtual void Twin(const TwinShape& shape, size_t numel) = 0;
  virtual void Copy(size_t bytes) = 0;
};

// Unimplemented where there is no GPU, or no toolkit at build time; the message says which.
absl::StatusOr<std::unique_ptr<KernelTimer>> MakeKernelTimer();

}  // namespace thinwire

#endif  // THINWIRE_BENCH_KERNEL_TIMER_H_
