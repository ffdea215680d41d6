// Checked: exchanges whose blocks carry a CRC32C, over any data plane of host memory. TCP's own
// 16-bit checksum misses one damaged segment in 65,536, and nothing checks what network cards,
// switches and memory do to the bytes outside TCP.
#ifndef THINWIRE_TRANSPORT_CHECKED_CHECKED_H_
#define THINWIRE_TRANSPORT_CHECKED_CHECKED_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "transport/planes.h"

namespace thinwire {

// A block of n bytes becomes a message of n + 4: the block, then the CRC32C, little-endian, of the
// exchange's tag (8 bytes, little-endian) and the block. It is checked before the block is
// delivered. An exchange with a wrong CRC ends with DataLoss, which names both ranks; that fails
// the exchange and not yet the plane, so that whoever waits can fail the group with the tensor's
// name. Everything else behaves as in the inner plane. Either all ranks have such a plane or none.
class Checked final : public DataPlane {
 public:
  explicit Checked(std::unique_ptr<DataPlane> inner);

  const Membership& members() const override { return inner_->members(); }
  DataTraits traits() const override { return inner_->traits(); }
  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override;
  std::unique_ptr<Exchange> Expect(uint64_t tag, std::span<const MutableBytes> recv) override;
  const std::shared_ptr<Failure>& failure() const override { return inner_->failure(); }
  uint64_t bytes_sent() const override { return bytes_sent_; }

 private:
  class SpareBlocks;
  class Messages;
  class InFlight;

  const std::unique_ptr<DataPlane> inner_;
  const std::shared_ptr<SpareBlocks> spare_;
  std::atomic<uint64_t> bytes_sent_{0};  // of blocks, without their CRCs
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_CHECKED_CHECKED_H_
