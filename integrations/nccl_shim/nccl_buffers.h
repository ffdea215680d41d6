// NcclBuffers: what is kept of the buffers that a program reduces again and again: how each is cut,
// and its residuals.
//
// A call of NCCL names no tensor. A buffer is known by its address, elements, dtype and operation:
// frameworks keep gradients in memory that lives as long as the training. Where an address is used
// for another tensor, that one gets the residual of the former.
#ifndef THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_BUFFERS_H_
#define THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_BUFFERS_H_

#include <compare>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "compress/device.h"
#include "compress/types.h"
#include "schedule/collective/partition.h"
#include "schedule/request.h"

namespace thinwire {

// How a buffer of so many elements, of all ranks together in a reduce-scatter, is cut. Options have
// one codec.
Partition PartitionOf(Collective collective, size_t numel, int world, const Options& options);

// One communicator's. Not thread-safe.
class NcclBuffers {
 public:
  struct Key {
    const void* data = nullptr;
    size_t numel = 0;
    DType dtype = DType::kF32;
    Op op = Op::kSum;
    Collective collective = Collective::kAllReduce;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  struct Buffer {
    Partition partition;
    DeviceMemory residual;  // a float an element; null: there is no feedback
    uint64_t number = 0;    // counts the buffers, in the order in which they came
    uint64_t uses = 0;
  };

  // Residuals take up to `most_bytes` of the device, which outlives this; those of the buffers that
  // have not been used for longest make room first. What is allocated is freed with this, not
  // before: freeing waits for all work of the device, other communicators' too, whose peers may be
  // waiting in the same way.
  NcclBuffers(Device& device, int world, Options options, size_t most_bytes)
      : device_(device), world_(world), options_(std::move(options)), most_bytes_(most_bytes) {}

  // Allocates what the others need, before there are any.
  absl::Status Prepare();

  // Counts the use. New residuals are zero for later work of the stream. A buffer that is larger
  // than what may be kept or has been, or that the device has no memory for, has none: that needs
  // no other rank's consent.
  Buffer& Use(const Key& key, DeviceStream& stream);

  size_t residual_bytes() const { return residual_bytes_; }

 private:
  struct Room {
    DeviceMemory memory;
    size_t bytes = 0;
  };
  struct Kept {
    Buffer buffer;
    size_t room;  // bytes behind its residual
    std::list<Key>::iterator place;
  };

  Room MakeRoom(size_t bytes);
  void FillWithZeros(uint8_t* memory, size_t bytes, DeviceStream& stream) const;
  void Drop(Key key);

  Device& device_;
  const int world_;
  const Options options_;
  const size_t most_bytes_;
  size_t residual_bytes_ = 0;  // allocated
  size_t largest_ = 0;         // of the residuals allocated, bytes
  uint64_t made_ = 0;
  DeviceMemory zeros_;                        // pinned
  std::multimap<size_t, DeviceMemory> free_;  // by bytes
  std::map<Key, Kept> kept_;
  std::list<Key> by_use_;  // the latest first
};

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_BUFFERS_H_
