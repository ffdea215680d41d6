// Device: memory and ordered work of one accelerator, as the layers above see them. Host memory
// needs none of this: where a Device may be null, null means the host.
//
// Work on a stream runs in order and behind the host's back. A failure of the device (out of
// memory, a faulty kernel) is kept by the stream that met it, and comes out of the next status() or
// Synchronize(): Internal or ResourceExhausted. All is thread-safe.
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
  // The same for a caller with memory of the device: what one kernel of a codec leaves for the next
  // is kept there, and not in memory that is allocated in the stream's order. One thread at a time
  // uses it; the room must stay until its work is done.
  virtual std::unique_ptr<Backend> BackendIn(MutableBytes room) = 0;

  // Queues a copy between any two memories; host memory must be pinned, and stay.
  virtual void Copy(void* to, const void* from, size_t bytes) = 0;

  // The end of what is queued so far; null after a failure.
  virtual std::shared_ptr<DeviceEvent> Record() = 0;
  // Work that is queued from here on comes after the event, which may be of any stream. Null is no
  // event.
  virtual void WaitFor(const std::shared_ptr<DeviceEvent>& event) = 0;
  // True if the work before the event is done; the host does not wait. True for null, and after a
  // failure of the device, since nothing more will come.
  virtual bool HasReached(const std::shared_ptr<DeviceEvent>& event) = 0;

  // The stream as the device's own libraries know it: a cudaStream_t on a GPU.
  virtual void* handle() const = 0;

  // True if what is queued goes into a graph that is being captured, and does not run now. False
  // after a failure of the device.
  virtual bool IsCapturing() = 0;

  // The host sleeps until all that is queued is done. DeadlineExceeded names the device.
  absl::Status Synchronize(std::chrono::steady_clock::time_point deadline) {
    return SynchronizeWhile(deadline, [] { return absl::OkStatus(); });
  }
  // The same, but gives up with what `health` says once that is not OK, which it is asked some ten
  // times a second. Work of the stream goes on then, as it does after the deadline.
  virtual absl::Status SynchronizeWhile(std::chrono::steady_clock::time_point deadline,
                                        absl::FunctionRef<absl::Status()> health) = 0;
  virtual absl::Status status() const = 0;  // the first failure
};

// Codecs that do nothing but find out what the true ones would need. Addresses are not looked at.
class Rehearsal {
 public:
  virtual ~Rehearsal() = default;
  virtual const Backend& backend() const = 0;
  // The bytes of DeviceStream::BackendIn's room with which all calls so far would do.
  virtual size_t room() const = 0;
};

// The way between two devices: through host memory; to one another's memory over PCIe; or over a
// link of their own, such as NVLink.
enum class PeerReach { kHostMemory = 0, kBus = 1, kLink = 2 };

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;  // "cuda:0"
  // Text that is equal for one device in all processes of its host, and differs between devices of
  // all hosts, whatever number each process knows it by. Internal if the device does not answer.
  virtual absl::StatusOr<std::string> identity() const = 0;

  // How it reaches the device that is hardest to reach of all that this process sees; kBus where it
  // sees no other. Internal if the device does not answer.
  virtual absl::StatusOr<PeerReach> ReachesPeers() const = 0;

  // Calls `work` at once, with this device as the calling thread's current one, which libraries
  // take theirs from. Internal if the device can't be used; then nothing is called.
  virtual absl::Status RunOn(absl::FunctionRef<void()> work) = 0;

  // True if the memory at this address is this device's.
  virtual bool Holds(const void* address) const = 0;

  // Aligned to 256 bytes. ResourceExhausted says how much was asked for. Freeing waits for work
  // that may use it.
  virtual absl::StatusOr<DeviceMemory> Allocate(size_t bytes) = 0;
  virtual absl::StatusOr<DeviceMemory> AllocatePinned(size_t bytes) = 0;  // host memory

  virtual std::unique_ptr<Rehearsal> Rehearse() const = 0;

  virtual absl::StatusOr<std::unique_ptr<DeviceStream>> MakeStream() = 0;
  // A caller's stream (a cudaStream_t; null: the default one), which outlives what is returned.
  virtual std::unique_ptr<DeviceStream> Adopt(void* stream) = 0;
};

// The last events of several streams, each in a slot: what comes after a Fence comes after them.
class Fence {
 public:
  // It has so many slots, and gets more if a stream sets a later one.
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
  // A slot a lane, and a few more: as many as this need no memory of their own.
  using Events = absl::InlinedVector<std::shared_ptr<DeviceEvent>, 16>;

  mutable absl::Mutex mu_;
  Events events_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_DEVICE_H_
