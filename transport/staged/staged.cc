#include "transport/staged/staged.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace thinwire {
namespace {

constexpr size_t kLine = 64;  // bytes

size_t RoomOf(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Copies on a stream. Blocks that are adjacent in both memories, such as those of an array, become
// one copy, since each copy costs some microseconds in addition to its bytes.
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

bool IsForeign(int rank, Bytes block, size_t r) {
  return r != static_cast<size_t>(rank) && !block.empty();
}

// An all-gather sends the same block to every rank, and copies it once.
bool IsCopied(int rank, std::span<const Bytes> send, size_t r) {
  if (!IsForeign(rank, send[r], r)) return false;
  size_t before = r;
  while (before-- > 0) {
    if (!IsForeign(rank, send[before], before)) continue;
    return send[before].data() != send[r].data() || send[before].size() != send[r].size();
  }
  return true;
}

}  // namespace

// An exchange in flight. One that was never waited for fails the host plane, as the contract says,
// before its slab is returned.
class Staged::InFlight final : public Exchange {
 public:
  InFlight(Staged& staged, std::span<const MutableBytes> recv)
      : staged_(staged), rank_(staged.rank()), recv_(recv.begin(), recv.end()) {}
  ~InFlight() override {
    inner_.reset();
    staged_.slabs_.Give(std::move(slab_));
  }

  absl::Status Begin(uint64_t tag, std::span<const Bytes> send, Deadline deadline) {
    if (absl::Status status = TakeSlab(send); !status.ok()) return status;
    ready_ = staged_.stream_.Record();
    if (absl::Status status = staged_.stream_.status(); !status.ok()) return status;
    DeviceStream& to_host = *staged_.to_host_;
    to_host.WaitFor(ready_);
    to_host.WaitFor(slab_.used);
    CopyToHost(send, to_host);
    slab_.used = to_host.Record();
    DataPlane& host = staged_.host_;
    absl::Status status = to_host.SynchronizeWhile(deadline, [&host] { return host.status(); });
    if (!status.ok()) {  // copies may go on: synchronising the stream must wait for them
      staged_.stream_.WaitFor(slab_.used);
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
    to_device.WaitFor(ready_);  // earlier work may use the receive blocks
    CopyToDevice(to_device);
    slab_.used = to_device.Record();  // the host has waited for the copies of sent blocks
    staged_.stream_.WaitFor(slab_.used);
    const absl::Status status = to_device.status();
    return status.ok() ? staged_.stream_.status() : status;
  }

 private:
  // Takes one slab for all peers: first the blocks to send, then those to receive.
  absl::Status TakeSlab(std::span<const Bytes> send) {
    const size_t bytes = SlabBytes(rank_, send, recv_);
    if (bytes == 0) return absl::OkStatus();
    absl::StatusOr<Slab> slab = staged_.slabs_.Take(bytes);
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
      if (IsCopied(rank_, send, r)) {
        const MutableBytes room = Place(send[r].size());
        copies.Add(room.data(), send[r].data(), room.size());
        last = room;
      }
      out_.push_back(IsForeign(rank_, send[r], r) ? last : Bytes());
    }
    for (size_t r = 0; r < recv_.size(); ++r) {
      in_.push_back(IsForeign(rank_, recv_[r], r) ? Place(recv_[r].size()) : MutableBytes());
    }
  }
  void CopyToDevice(DeviceStream& stream) const {
    Copies copies(stream);
    for (size_t r = 0; r < in_.size(); ++r) {
      if (!in_[r].empty()) copies.Add(recv_[r].data(), in_[r].data(), in_[r].size());
    }
  }

  Staged& staged_;
  const int rank_;
  const std::vector<MutableBytes> recv_;  // in device memory
  std::vector<Bytes> out_;                // pinned, like `in_`
  std::vector<MutableBytes> in_;
  Slab slab_;
  size_t placed_ = 0;                   // bytes of slab_
  std::shared_ptr<DeviceEvent> ready_;  // the work of the stream before Start
  std::unique_ptr<Exchange> inner_;
  absl::Status failed_;
};

size_t Staged::SlabBytes(int rank, std::span<const Bytes> send,
                         std::span<const MutableBytes> recv) {
  size_t bytes = 0;
  for (size_t r = 0; r < send.size(); ++r) {
    if (IsCopied(rank, send, r)) bytes += RoomOf(send[r].size());
    if (IsForeign(rank, recv[r], r)) bytes += RoomOf(recv[r].size());
  }
  return bytes;
}

absl::StatusOr<std::unique_ptr<Staged>> Staged::Make(DataPlane& host, Device& device,
                                                     DeviceStream& stream, SlabPool& slabs,
                                                     std::chrono::milliseconds patience) {
  absl::StatusOr<std::unique_ptr<DeviceStream>> to_host = device.MakeStream();
  if (!to_host.ok()) return to_host.status();
  absl::StatusOr<std::unique_ptr<DeviceStream>> to_device = device.MakeStream();
  if (!to_device.ok()) return to_device.status();
  return std::unique_ptr<Staged>(
      new Staged(host, stream, slabs, *std::move(to_host), *std::move(to_device), patience));
}

Staged::Staged(DataPlane& host, DeviceStream& stream, SlabPool& slabs,
               std::unique_ptr<DeviceStream> to_host, std::unique_ptr<DeviceStream> to_device,
               std::chrono::milliseconds patience)
    : host_(host),
      stream_(stream),
      slabs_(slabs),
      to_host_(std::move(to_host)),
      to_device_(std::move(to_device)),
      patience_(patience) {}

// Waits until no copy uses the slabs any more, but at most patience_. An error is ignored: copies
// may then still run, and the code relies on the freeing of a slab to wait for them (see Device).
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
    // Otherwise peers would wait for blocks that never come.
    host_.Abort(status);
    exchange->Fail(std::move(status));
  }
  return exchange;
}

}  // namespace thinwire
