// Split: exchanges whose blocks go by one data plane inside the rank's node, and by another one
// between nodes.
#ifndef THINWIRE_TRANSPORT_SPLIT_SPLIT_H_
#define THINWIRE_TRANSPORT_SPLIT_SPLIT_H_

#include <cstdint>
#include <memory>

#include "transport/planes.h"

namespace thinwire {

// Both planes match by tag, block, and are of host memory. A failure of either fails both.
class Split final : public DataPlane {
 public:
  // `inside`: of this node, whose ranks are neighbours in `between`, which has all ranks. It has
  // Expect if `between` has.
  Split(std::unique_ptr<DataPlane> inside, std::unique_ptr<DataPlane> between);

  const Membership& members() const override { return between_->members(); }
  DataTraits traits() const override { return {}; }
  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override;
  std::unique_ptr<Exchange> Expect(uint64_t tag, std::span<const MutableBytes> recv) override;
  const std::shared_ptr<Failure>& failure() const override { return between_->failure(); }
  uint64_t bytes_sent() const override { return inside_->bytes_sent() + between_->bytes_sent(); }

 private:
  class InFlight;

  const std::unique_ptr<DataPlane> inside_, between_;
  const size_t first_, count_;  // the ranks of this node
  const FailureTie tie_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_SPLIT_SPLIT_H_
