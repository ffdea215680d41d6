// Staged: exchanges of device memory over a data plane of host memory. What is sent is copied to
// pinned memory first, and what is received is copied from it afterwards. Only these bytes, which
// are compressed ones, cross the bus.
#ifndef THINWIRE_TRANSPORT_STAGED_STAGED_H_
#define THINWIRE_TRANSPORT_STAGED_STAGED_H_

#include <chrono>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "compress/device.h"
#include "transport/planes.h"
#include "transport/staged/slab_pool.h"

namespace thinwire {

// Its memory is kStream: blocks are of `device`, and an exchange is part of the work of a stream.
// Start sleeps until the stream has made what is sent, the plane has failed, or `patience` is over.
// Copies run on two streams of their own, one a direction, so that those of exchanges in flight
// overlap; the exchange's stream waits for what is received. Matching, failure, peers and the count
// of bytes are the host plane's. The references must outlive this; slabs may serve several planes.
class Staged final : public DataPlane {
 public:
  static absl::StatusOr<std::unique_ptr<Staged>> Make(DataPlane& host, Device& device,
                                                      DeviceStream& stream, SlabPool& slabs,
                                                      std::chrono::milliseconds patience);
  ~Staged() override;

  // The bytes of pinned memory that an exchange of rank `rank` takes while it is in flight.
  static size_t SlabBytes(int rank, std::span<const Bytes> send,
                          std::span<const MutableBytes> recv);

  const Membership& members() const override { return host_.members(); }
  DataTraits traits() const override {
    return {host_.traits().matching, Completion::kBlocking, Memory::kStream};
  }
  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override;
  const std::shared_ptr<Failure>& failure() const override { return host_.failure(); }
  uint64_t bytes_sent() const override { return host_.bytes_sent(); }

 private:
  class InFlight;

  Staged(DataPlane& host, DeviceStream& stream, SlabPool& slabs,
         std::unique_ptr<DeviceStream> to_host, std::unique_ptr<DeviceStream> to_device,
         std::chrono::milliseconds patience);

  DataPlane& host_;
  DeviceStream& stream_;  // of the caller's work
  SlabPool& slabs_;       // of pinned memory
  const std::unique_ptr<DeviceStream> to_host_, to_device_;
  const std::chrono::milliseconds patience_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_STAGED_STAGED_H_
