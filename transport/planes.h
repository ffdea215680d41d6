// The planes of a group: DataPlane exchanges blocks of memory between its ranks, StreamPlane does
// so on a device's streams, and ControlPlane carries small frames and reports lost peers. Transport
// holds the planes of one rank, as a backend creates them. One contract holds for every backend;
// tests/transport/data_plane_test.cc and control_plane_test.cc state it.
//
// A plane is thread-safe, and any number of exchanges may be in flight. Its failure is sticky: the
// first reason is the result of every exchange in flight and of every later one, and what Send,
// Receive and status return from then on. The reason is Unavailable and names the rank when a peer
// is gone, DeadlineExceeded when a peer did not answer in time, and the caller's own status after
// Abort. No call throws, and none ends the process.
#ifndef THINWIRE_TRANSPORT_PLANES_H_
#define THINWIRE_TRANSPORT_PLANES_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "compress/types.h"
#include "transport/membership.h"

namespace thinwire {

// The clock of all waits.
using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// The time left until a deadline, for absl::Mutex::AwaitWithTimeout. That converts it to the
// system's clock, which may jump, so check Clock after a wait that timed out. Use SteadyCondVar for
// waits that must end at their deadline even if the system's clock is set back.
inline absl::Duration TimeLeft(Deadline deadline) {
  return absl::FromChrono(deadline - Clock::now());
}

class DeviceStream;
class StreamPlane;

// Failure: why the planes of one rank can't go on. The first reason is kept.
//
// Planes that fail together share one Failure: those of one backend do, and planes over other
// connections pass theirs on to it, or listen to it. So a failure reaches every plane at once,
// whichever plane finds it.
//
// Thread-safe.
class Failure : public std::enable_shared_from_this<Failure> {
 public:
  static std::shared_ptr<Failure> Make();

  // Records `reason`, which is not OK. If it is the first, all listeners have been called when this
  // returns. Don't call it with a lock held that a listener takes.
  void Fail(absl::Status reason);

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // The first reason, or OK.
  absl::Status reason() const;

  // Keeps a listener registered. The destructor waits for a call in progress on another thread.
  class Listener {
   public:
    Listener() = default;
    ~Listener() { Reset(); }
    Listener(Listener&& other) noexcept { *this = std::move(other); }
    Listener& operator=(Listener&& other) noexcept {
      Reset();
      failure_ = std::move(other.failure_);
      id_ = other.id_;
      return *this;
    }
    void Reset() {
      if (failure_ != nullptr) std::exchange(failure_, nullptr)->Remove(id_);
    }

   private:
    friend class Failure;
    Listener(std::shared_ptr<Failure> failure, uint64_t id)
        : failure_(std::move(failure)), id_(id) {}

    std::shared_ptr<Failure> failure_;
    uint64_t id_ = 0;
  };

  // Calls `tell` when this fails, on the thread that found the failure and with no lock held; at
  // once if it has failed already; perhaps twice. `tell` must not block.
  [[nodiscard]] Listener Listen(std::function<void()> tell);
  // Until the listener is destroyed, `to` fails for the same reason when this does.
  [[nodiscard]] Listener PassOn(std::shared_ptr<Failure> to) {
    return Listen([this, to = std::move(to)] { to->Fail(reason()); });
  }

 private:
  Failure() = default;
  void TellAll();
  void Remove(uint64_t id);

  std::atomic<bool> failed_{false};  // reason_ is not OK
  mutable absl::Mutex mu_;
  absl::CondVar told_;
  absl::Status reason_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, std::shared_ptr<const std::function<void()>>> listeners_ ABSL_GUARDED_BY(mu_);
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
  // Calls in progress: listener and thread.
  std::multimap<uint64_t, std::thread::id> calls_ ABSL_GUARDED_BY(mu_);
};

// How a plane finds out which exchanges of two ranks belong together.
enum class Matching {
  kByTag,    // ranks may start exchanges in any order and from any thread
  kByOrder,  // all ranks start the same exchanges in the same order; one thread at a time starts
};

// How a plane says that an exchange has ended.
enum class Completion {
  kBlocking,  // by Wait only: each exchange in flight needs a thread
  kEvents,    // by Wait or by OnDone
};

// Where the blocks lie.
enum class Memory {
  kHost,
  // In a device's memory; an exchange runs on one stream. It starts after the work queued before
  // it. Work queued after Wait or OnDone sees the received blocks, although the host has not waited
  // for them; Flush reports a failure that occurs after that.
  kStream,
};

struct DataTraits {
  Matching matching = Matching::kByTag;
  Completion completion = Completion::kBlocking;
  Memory memory = Memory::kHost;
  // StreamPlane::Allocate gives memory whose blocks travel with fewer copies.
  bool allocates = false;
};

// An exchange in flight. Until it has ended, its blocks must live and what is sent must not change.
// The caller ends it by one call of Wait or of OnDone. Dropping an exchange for which neither was
// called fails the plane, because its blocks would be written after they are freed. An exchange
// must not outlive its plane.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // For an exchange from DataPlane::Expect; call it once, before Wait or OnDone. Sends send[r] to
  // each rank r, as Start would have. A plane without Expect never gets this call: its exchanges
  // send when they start.
  virtual void Send(std::span<const Bytes>) {}

  // Returns OK when all blocks were sent and received, otherwise the plane's failure; either way
  // the plane no longer touches the blocks. Passing the deadline fails the whole plane.
  virtual absl::Status Wait(Deadline deadline) = 0;

  // Calls `done` once, with the status that Wait would return, when the exchange has ended. It runs
  // on any thread, possibly before OnDone returns, and must not block. The exchange may be dropped
  // before that. There is no deadline: to set one, call Abort when it has passed. Planes whose
  // completion is kBlocking call `done` at once with Internal.
  virtual void OnDone(std::function<void(absl::Status)> done) {
    done(absl::InternalError("this data plane's exchanges end by Wait only, not by OnDone"));
  }
};

// The part that all planes have in common.
class Plane {
 public:
  virtual ~Plane() = default;

  virtual const Membership& members() const = 0;
  int rank() const { return members().rank; }
  int size() const { return members().size; }

  // This rank's failure, which several planes may share.
  virtual const std::shared_ptr<Failure>& failure() const = 0;
  // Fails the plane on this rank with `reason`, unless it has failed before. Thread-safe.
  void Abort(absl::Status reason) { failure()->Fail(std::move(reason)); }
  // The first failure, or OK.
  absl::Status status() const { return failure()->reason(); }
};

// The destructor ends the exchanges in flight. No caller may still be waiting for one.
class DataPlane : public Plane {
 public:
  virtual DataTraits traits() const = 0;

  // Sends send[r] to each rank r and receives recv[r] from it; both spans have size() blocks. The
  // blocks at index rank() are ignored, and empty blocks are neither sent nor awaited. Matching
  // exchanges carry the same tag on all ranks, and no tag is used twice. Both ends must agree on
  // the size of a block, which is matched as well: if they disagree, the exchange ends at its
  // deadline, but nothing is written past the end of a block. AllToAll passes a different block for
  // every rank; AllGather passes one block size() times.
  virtual std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                          std::span<const MutableBytes> recv) {
    std::unique_ptr<Exchange> exchange = Expect(tag, recv);
    exchange->Send(send);
    return exchange;
  }

  // Begins to receive the blocks of an exchange whose own blocks are not ready yet: Send completes
  // the start. It helps if a sender waits until its receiver is ready. Returns null if the plane
  // gains nothing by it or matches by order; such a plane overrides Start.
  virtual std::unique_ptr<Exchange> Expect(uint64_t, std::span<const MutableBytes>) {
    return nullptr;
  }

  // This plane if it is a StreamPlane, else null.
  virtual StreamPlane* of_streams() { return nullptr; }

  // The bytes of all blocks that this rank has sent so far.
  virtual uint64_t bytes_sent() const = 0;
};

// A data plane whose exchanges run on a device's streams and end when they are queued, before their
// blocks have arrived, such as NCCL's.
class StreamPlane : public DataPlane {
 public:
  StreamPlane* of_streams() final { return this; }

  // Returns a plane whose exchanges run on `stream`, which must outlive it, as this plane must. It
  // shares this plane's order, failure and byte count.
  virtual std::unique_ptr<StreamPlane> On(DeviceStream& stream) = 0;
  // An empty exchange, which ends when the plane's stream has done all work queued so far.
  virtual std::unique_ptr<Exchange> Flush() = 0;

  // Returns memory of the plane's device, aligned to 256 bytes, if traits().allocates. In an
  // exchange either all blocks lie in such memory, on every rank, or none does. Free it only after
  // all work on it has ended. Errors: ResourceExhausted, the plane's failure, or Unimplemented if
  // the plane has no memory of its own. May wait for exchanges that are being queued.
  virtual absl::StatusOr<DeviceMemory> Allocate(size_t bytes) = 0;
};

// Frames have one fixed size, because Gloo ends the process on a size that differs.
inline constexpr size_t kControlBytes = 1024;
using ControlFrame = std::array<uint8_t, kControlBytes>;

struct ControlMessage {
  int from = 0;
  ControlFrame frame;
};

// The destructor leaves the group: the planes of the peers fail with Unavailable, which names this
// rank. Frames sent before that get a short time to leave.
class ControlPlane : public Plane {
 public:
  // Copies the frame and never waits, not even for a peer that receives nothing. Frames between two
  // ranks arrive in the order in which they were sent. After a failure a frame is still sent if the
  // connection allows, so that peers learn the reason; Send returns the failure all the same.
  virtual absl::Status Send(int to, const ControlFrame& frame) = 0;

  // Sends the frame to every peer. Failures are ignored: check status().
  void SendToAll(const ControlFrame& frame) {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) Send(peer, frame).IgnoreError();
    }
  }

  // Blocks until a frame from any rank has arrived, or until the plane has failed and all earlier
  // frames were received. Only one thread at a time may call it.
  virtual absl::StatusOr<ControlMessage> Receive() = 0;

  // After a failure: blocks until the frames sent so far have left, or until the deadline, so that
  // the process does not exit before they do. Only one thread at a time may call it. Without a
  // failure it returns at once.
  virtual void Flush(Deadline deadline) = 0;
};

// How planes put blocks into messages. Ranks with different versions could not match their blocks,
// so the versions are compared before they connect. 2: small blocks travel in parcels
// (gloo/gloo_links.h).
inline constexpr int kFramingVersion = 2;

// Continues a CRC32C (Castagnoli polynomial, RFC 3720, appendix B.4): returns the CRC of the bytes
// that gave `crc`, followed by `bytes`. Start with 0. Messages carry it where damage matters: it
// detects every error burst of up to 32 bits, every odd number of wrong bits, and all but one in
// 2^32 other errors.
uint32_t Crc32c(uint32_t crc, Bytes bytes);

// Like Crc32c, and also copies the bytes to `to`.
uint32_t CopyWithCrc32c(uint32_t crc, Bytes bytes, uint8_t* to);

// A movable value. The data plane is destroyed first: destroying the control plane leaves the
// group, and the data plane of the same backend needs its connections until then. Destroying or
// replacing only the data plane leaves the control plane as it is.
//
// Planes of one backend may share their failure: those of Gloo and in_process do, so aborting
// either fails both. Planes of different backends do not, so code that combines them must pass a
// failure on.
struct Transport {
  std::unique_ptr<ControlPlane> control;
  std::unique_ptr<DataPlane> data;

  Transport() = default;
  Transport(std::unique_ptr<ControlPlane> control, std::unique_ptr<DataPlane> data)
      : control(std::move(control)), data(std::move(data)) {}
  ~Transport() { Reset(); }

  Transport(Transport&&) = default;
  Transport& operator=(Transport&& other) {
    if (this == &other) return *this;
    Reset();
    control = std::move(other.control);
    data = std::move(other.data);
    return *this;
  }

  // Either both planes are set or the value is empty: a world of one needs no transport.
  bool empty() const { return control == nullptr; }
  const Membership& members() const { return control->members(); }

  // Leaves the group; the value is empty afterwards.
  void Reset() {
    data.reset();
    control.reset();
  }
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_PLANES_H_
