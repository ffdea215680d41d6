// Device: memory and ordered work of one accelerator, as the layers above see them. Host memory
// needs none of this: a null Device means the host.
//
// Work on a stream runs in order and asynchronously. The stream on which a device failure (out of
// memory, a faulty kernel) occurs keeps it, and its next status() or Synchronize() returns it:
// Internal or ResourceExhausted. Everything is thread-safe.
#ifndef THINWIRE_COMPRESS_DEVICE_H_
#define THINWIRE_COMPRESS_DEVICE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "compress/types.h"

namespace thinwire {

class Backend;
class Rehearsal;

// A point in the work of a stream.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
};

class DeviceStream {
 public:
  virtual ~DeviceStream() = default;

  // Codecs that run on this stream: each call queues kernels and returns.
  virtual const Backend& backend() const = 0;
  // The same for a caller that provides device memory: what one kernel of a codec leaves for the
  // next is kept in `room` instead of memory that is allocated in the stream's order. Only one
  // thread at a time may use the backend; `room` must live until its work is done.
  virtual std::unique_ptr<Backend> BackendIn(MutableBytes room) = 0;

  // Queues a copy between any two memories; host memory must be pinned, and live until the copy is
  // done.
  virtual void Copy(void* to, const void* from, size_t bytes) = 0;

  // The end of the work queued so far; null after a failure.
  virtual std::shared_ptr<DeviceEvent> Record() = 0;
  // Work queued from now on runs after the event, which may belong to any stream. Null: no event.
  virtual void WaitFor(const std::shared_ptr<DeviceEvent>& event) = 0;
  // True if the work before the event is done; does not wait. True for null, and after a failure of
  // the device, since no more work will be done.
  virtual bool HasReached(const std::shared_ptr<DeviceEvent>& event) = 0;

  // The stream's native handle: a cudaStream_t on a GPU.
  virtual void* handle() const = 0;

  // True if queued work is being captured in a graph and does not run now. False after a failure of
  // the device.
  virtual bool IsCapturing() = 0;

  // The host sleeps until all queued work is done. DeadlineExceeded names the device.
  absl::Status Synchronize(std::chrono::steady_clock::time_point deadline) {
    return SynchronizeWhile(deadline, [] { return absl::OkStatus(); });
  }
  // The same, but returns the result of `health`, which is called some ten times per second, once
  // that is not OK. The stream's work then continues, as it does after the deadline.
  virtual absl::Status SynchronizeWhile(std::chrono::steady_clock::time_point deadline,
                                        absl::FunctionRef<absl::Status()> health) = 0;
  virtual absl::Status status() const = 0;  // the first failure
};

// A backend that runs no codec but computes the room that the real one would need. It never
// accesses the memory at the addresses it is given.
class Rehearsal {
 public:
  virtual ~Rehearsal() = default;
  virtual const Backend& backend() const = 0;
  // The bytes of BackendIn's `room` that suffice for all calls so far.
  virtual size_t room() const = 0;
};

// The path between two devices: through host memory; directly over PCIe; or over a link of their
// own, such as NVLink.
enum class PeerReach { kHostMemory = 0, kBus = 1, kLink = 2 };

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;  // "cuda:0"
  // Text that is equal for one device in all processes of its host, and differs between any two
  // devices of any hosts, whatever number a process gives them. Internal if the device does not
  // respond.
  virtual absl::StatusOr<std::string> identity() const = 0;

  // The worst path to any other device that this process sees; kBus if it sees no other. Internal
  // if the device does not respond.
  virtual absl::StatusOr<PeerReach> ReachesPeers() const = 0;

  // Calls `work` at once, with this device as the calling thread's current one, which libraries
  // use. Internal if the device can't be used; then `work` is not called.
  virtual absl::Status RunOn(absl::FunctionRef<void()> work) = 0;

  // True if the memory at this address is this device's.
  virtual bool Holds(const void* address) const = 0;

  // Aligned to 256 bytes. ResourceExhausted names the requested size. Freeing waits for work that
  // may use the memory.
  virtual absl::StatusOr<DeviceMemory> Allocate(size_t bytes) = 0;
  virtual absl::StatusOr<DeviceMemory> AllocatePinned(size_t bytes) = 0;  // host memory

  virtual std::unique_ptr<Rehearsal> Rehearse() const = 0;

  virtual absl::StatusOr<std::unique_ptr<DeviceStream>> MakeStream() = 0;
  // Wraps a caller's stream (a cudaStream_t; null: the default one), which must outlive the result.
  virtual std::unique_ptr<DeviceStream> Adopt(void* stream) = 0;
};

// The last events of several streams, one per slot: work after HoldBack runs after all of them.
class Fence {
 public:
  // `slots` slots; more are added if a stream sets a later one.
  explicit Fence(size_t slots) : events_(slots) {}

  void Set(size_t slot, std::shared_ptr<DeviceEvent> event) {
    const absl::MutexLock lock(&mu_);
    if (slot >= events_.size()) events_.resize(slot + 1);  // withdrawn chunks are rare
    events_[slot].swap(event);  // the former event is released after the lock
  }
  void HoldBack(DeviceStream& stream) const {
    Events events;
    {
      const absl::MutexLock lock(&mu_);
      events = events_;
    }
    for (const auto& event : events) stream.WaitFor(event);
  }

 private:
  // A slot per lane, and a few more: up to 16 need no allocation.
  using Events = absl::InlinedVector<std::shared_ptr<DeviceEvent>, 16>;

  mutable absl::Mutex mu_;
  Events events_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_DEVICE_H_
