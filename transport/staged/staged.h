// Staged: exchanges of device memory over a data plane of host memory. What is sent is copied to
// pinned memory first, and what is received is copied from it afterwards. Only these bytes, which
// are compressed ones, cross the bus.
#ifndef THINWIRE_TRANSPORT_STAGED_STAGED_H_
#define THINWIRE_TRANSPORT_STAGED_STAGED_H_

#include <chrono>
#include <memory>
#include <utility>

#include "compress/device.h"
#include "transport/data_plane.h"

namespace thinwire {

// Its memory is kStream: blocks are of `device`, and an exchange is part of the work of `stream`.
// Start waits until the stream has made what is sent (within `patience`). Matching, failure, peers
// and the count of bytes are the host plane's. The references must outlive this.
class Staged final : public DataPlane {
 public:
  Staged(DataPlane& host, Device& device, DeviceStream& stream, std::chrono::milliseconds patience);
  ~Staged() override;

  const Membership& members() const override { return host_.members(); }
  DataTraits traits() const override {
    return {host_.traits().matching, Completion::kBlocking, Memory::kStream};
  }
  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override;
  void Abort(absl::Status reason) override { host_.Abort(std::move(reason)); }
  absl::Status status() const override { return host_.status(); }
  uint64_t bytes_sent() const override { return host_.bytes_sent(); }

 private:
  class Pinned;
  class InFlight;

  DataPlane& host_;
  DeviceStream& stream_;
  const std::chrono::milliseconds patience_;
  const std::shared_ptr<Pinned> pinned_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_STAGED_STAGED_H_
