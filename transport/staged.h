// Staged: exchanges of device memory over a transport of host memory. What is sent is copied to
// pinned memory first, what is received is copied from it afterwards; only these bytes, which are
// compressed ones, cross the bus.
#ifndef THINWIRE_TRANSPORT_STAGED_H_
#define THINWIRE_TRANSPORT_STAGED_H_

#include <chrono>
#include <memory>

#include "compress/device.h"
#include "transport/transport.h"

namespace thinwire {

// The contract of Transport, but for this: blocks are of `device`, and an exchange is part of the
// work of `stream`. Start waits until the stream has made what is sent (within `patience`); after
// Wait, what was received is there for later work of the stream, and the host has not waited for
// it. All else, and the end of the world, is the host transport's. References must outlive this.
class Staged final : public Transport {
 public:
  Staged(Transport& host, Device& device, DeviceStream& stream, std::chrono::milliseconds patience);
  ~Staged() override;

  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  std::unique_ptr<Pending> Start(uint64_t tag, std::span<const Bytes> send,
                                 std::span<const MutableBytes> recv) override;
  absl::Status SendControl(int to, const ControlFrame& frame) override {
    return host_.SendControl(to, frame);
  }
  absl::StatusOr<ControlMessage> ReceiveControl() override { return host_.ReceiveControl(); }
  void Abort(absl::Status reason) override { host_.Abort(std::move(reason)); }
  void FlushControl(Deadline deadline) override { host_.FlushControl(deadline); }
  absl::Status status() const override { return host_.status(); }
  uint64_t bytes_sent() const override { return host_.bytes_sent(); }

 private:
  class Pinned;
  class Exchange;

  Transport& host_;
  DeviceStream& stream_;
  const std::chrono::milliseconds patience_;
  const std::shared_ptr<Pinned> pinned_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_STAGED_H_
