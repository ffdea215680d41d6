// Staged: exchanges of device memory over a data plane of host memory. Blocks to send are first
// copied to pinned memory, and received blocks are copied from it. Only these bytes, which are
// compressed, cross the bus.
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

// Its memory is kStream: blocks lie on `device`, and an exchange is part of the work of a stream.
// Start sleeps until the stream has written the blocks to send, the plane has failed, or `patience`
// has passed. Copies run on two streams of their own, one per direction, so that those of exchanges
// in flight overlap; the exchange's stream waits for the received blocks. Matching, failure,
// members and bytes_sent are the host plane's. The references must outlive this; several planes may
// share `slabs`.
class Staged final : public DataPlane {
 public:
  static absl::StatusOr<std::unique_ptr<Staged>> Make(DataPlane& host, Device& device,
                                                      DeviceStream& stream, SlabPool& slabs,
                                                      std::chrono::milliseconds patience);
  ~Staged() override;

  // The bytes of pinned memory that an exchange of rank `rank` uses while it is in flight.
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
  DeviceStream& stream_;  // the caller's work runs here
  SlabPool& slabs_;       // pinned memory
  const std::unique_ptr<DeviceStream> to_host_, to_device_;
  const std::chrono::milliseconds patience_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_STAGED_STAGED_H_
