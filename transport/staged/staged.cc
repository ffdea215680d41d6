#include "transport/staged/staged.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace thinwire {
namespace {

constexpr size_t kLine = 64;  // bytes

size_t RoomOf(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Copies on a stream. Blocks that follow one another in both memories, as those of an array do, go
// as one, since each copy costs some microseconds beside its bytes.
class Copies {
 public:
  explicit Copies(DeviceStream& stream) : stream_(stream) {}
  ~Copies() { Flush(); }
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;

  void Add(uint8_t* to, const uint8_t* from, size_t bytes) {
    if (to != to_ + bytes_ || from != from_ + bytes_) {
      Flush();
      to_ = to;
      from_ = from;
      bytes_ = 0;
    }
    bytes_ += bytes;
  }

 private:
  void Flush() {
    if (bytes_ > 0) stream_.Copy(to_, from_, bytes_);
  }

  DeviceStream& stream_;
  uint8_t* to_ = nullptr;
  const uint8_t* from_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace

// Slabs of pinned memory, kept for the next exchange: pinning is slow.
class Staged::Slabs {
 public:
  explicit Slabs(Device& device) : device_(device) {}

  struct Slab {
    DeviceMemory memory;
    size_t bytes = 0;
  };

  absl::StatusOr<Slab> Take(size_t bytes) {
    {
      const absl::MutexLock lock(&mu_);
      const auto found = std::find_if(free_.begin(), free_.end(),
                                      [bytes](const Slab& slab) { return slab.bytes >= bytes; });
      if (found != free_.end()) {
        Slab slab = std::move(*found);
        free_.erase(found);
        return slab;
      }
    }
    absl::StatusOr<DeviceMemory> memory = device_.AllocatePinned(bytes);
    if (!memory.ok()) return memory.status();
    return Slab{*std::move(memory), bytes};
  }

  // Copies from and to it may still be queued; the stream waits for them.
  void Give(Slab slab) {
    if (slab.memory == nullptr) return;
    const absl::MutexLock lock(&mu_);
    free_.push_back(std::move(slab));
  }

 private:
  Device& device_;
  absl::Mutex mu_;
  std::vector<Slab> free_ ABSL_GUARDED_BY(mu_);
};

// An exchange in flight. One that was never waited for fails the host's plane, as the contract
// says, before its slab goes.
class Staged::InFlight final : public Exchange {
 public:
  InFlight(Staged& staged, std::span<const MutableBytes> recv)
      : staged_(staged), recv_(recv.begin(), recv.end()) {}
  ~InFlight() override {
    inner_.reset();
    staged_.slabs_->Give(std::move(slab_));
  }

  absl::Status Begin(uint64_t tag, std::span<const Bytes> send, Deadline deadline) {
    if (absl::Status status = TakeSlab(send); !status.ok()) return status;
    ready_ = staged_.stream_.Record();
    if (absl::Status status = staged_.stream_.status(); !status.ok()) return status;
    DeviceStream& to_host = *staged_.to_host_;
    to_host.WaitFor(ready_);  // and for all copies of the slab's last use, as the stream does
    CopyToHost(send, to_host);
    DataPlane& host = staged_.host_;
    absl::Status status = to_host.SynchronizeWhile(deadline, [&host] { return host.status(); });
    if (!status.ok()) {  // copies may go on, and whoever synchronises the stream is to outwait them
      staged_.stream_.WaitFor(to_host.Record());
      return status;
    }
    inner_ = host.Start(tag, out_, in_);
    return absl::OkStatus();
  }
  void Fail(absl::Status status) { failed_ = std::move(status); }

  absl::Status Wait(Deadline deadline) override {
    if (!failed_.ok()) return failed_;
    if (absl::Status status = inner_->Wait(deadline); !status.ok()) return status;
    DeviceStream& to_device = *staged_.to_device_;
    to_device.WaitFor(ready_);  // earlier work may use what is received into
    CopyToDevice(to_device);
    staged_.stream_.WaitFor(to_device.Record());
    const absl::Status status = to_device.status();
    return status.ok() ? staged_.stream_.status() : status;
  }

 private:
  bool IsOwn(size_t r) const { return r == static_cast<size_t>(staged_.host_.rank()); }

  bool IsForeign(Bytes block, size_t r) const { return !IsOwn(r) && !block.empty(); }

  // An all-gather sends one block to everybody, and copies it once.
  bool IsCopied(std::span<const Bytes> send, size_t r) const {
    if (!IsForeign(send[r], r)) return false;
    size_t before = r;
    while (before-- > 0) {
      if (!IsForeign(send[before], before)) continue;
      return send[before].data() != send[r].data() || send[before].size() != send[r].size();
    }
    return true;
  }

  // One slab for all peers, with what is sent before what is received.
  absl::Status TakeSlab(std::span<const Bytes> send) {
    size_t bytes = 0;
    for (size_t r = 0; r < send.size(); ++r) {
      if (IsCopied(send, r)) bytes += RoomOf(send[r].size());
      if (!IsOwn(r)) bytes += RoomOf(recv_[r].size());
    }
    if (bytes == 0) return absl::OkStatus();
    absl::StatusOr<Slabs::Slab> slab = staged_.slabs_->Take(bytes);
    if (slab.ok()) slab_ = *std::move(slab);
    return slab.status();
  }
  MutableBytes Place(size_t bytes) {
    return {slab_.memory.get() + std::exchange(placed_, placed_ + RoomOf(bytes)), bytes};
  }

  void CopyToHost(std::span<const Bytes> send, DeviceStream& stream) {
    Copies copies(stream);
    Bytes last;
    for (size_t r = 0; r < send.size(); ++r) {
      if (IsCopied(send, r)) {
        const MutableBytes room = Place(send[r].size());
        copies.Add(room.data(), send[r].data(), room.size());
        last = room;
      }
      out_.push_back(IsForeign(send[r], r) ? last : Bytes());
    }
    for (size_t r = 0; r < recv_.size(); ++r) {
      in_.push_back(IsForeign(recv_[r], r) ? Place(recv_[r].size()) : MutableBytes());
    }
  }
  void CopyToDevice(DeviceStream& stream) const {
    Copies copies(stream);
    for (size_t r = 0; r < in_.size(); ++r) {
      if (!in_[r].empty()) copies.Add(recv_[r].data(), in_[r].data(), in_[r].size());
    }
  }

  Staged& staged_;
  const std::vector<MutableBytes> recv_;  // of the device
  std::vector<Bytes> out_;                // pinned, as `in_`
  std::vector<MutableBytes> in_;
  Slabs::Slab slab_;
  size_t placed_ = 0;                   // bytes of it
  std::shared_ptr<DeviceEvent> ready_;  // the work of the stream before Start
  std::unique_ptr<Exchange> inner_;
  absl::Status failed_;
};

absl::StatusOr<std::unique_ptr<Staged>> Staged::Make(DataPlane& host, Device& device,
                                                     DeviceStream& stream,
                                                     std::chrono::milliseconds patience) {
  absl::StatusOr<std::unique_ptr<DeviceStream>> to_host = device.MakeStream();
  if (!to_host.ok()) return to_host.status();
  absl::StatusOr<std::unique_ptr<DeviceStream>> to_device = device.MakeStream();
  if (!to_device.ok()) return to_device.status();
  return std::unique_ptr<Staged>(
      new Staged(host, device, stream, *std::move(to_host), *std::move(to_device), patience));
}

Staged::Staged(DataPlane& host, Device& device, DeviceStream& stream,
               std::unique_ptr<DeviceStream> to_host, std::unique_ptr<DeviceStream> to_device,
               std::chrono::milliseconds patience)
    : host_(host),
      stream_(stream),
      to_host_(std::move(to_host)),
      to_device_(std::move(to_device)),
      patience_(patience),
      slabs_(std::make_unique<Slabs>(device)) {}

// Pinned memory goes when no copy uses it any more.
Staged::~Staged() {
  const Deadline deadline = Clock::now() + patience_;
  for (DeviceStream* copies : {to_host_.get(), to_device_.get()}) {
    copies->Synchronize(deadline).IgnoreError();
  }
}

std::unique_ptr<Exchange> Staged::Start(uint64_t tag, std::span<const Bytes> send,
                                        std::span<const MutableBytes> recv) {
  auto exchange = std::make_unique<InFlight>(*this, recv);
  if (absl::Status status = exchange->Begin(tag, send, Clock::now() + patience_); !status.ok()) {
    // Peers wait for what will not come.
    host_.Abort(status);
    exchange->Fail(std::move(status));
  }
  return exchange;
}

}  // namespace thinwire
