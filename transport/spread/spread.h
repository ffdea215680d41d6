// Spread: exchanges go by several data planes of the same ranks, each exchange by one of them.
//
// One thread moves all bytes of a plane over TCP, and copies them in and out of the kernel. Where a
// link is faster than that thread, planes with threads and connections of their own share the work.
#ifndef THINWIRE_TRANSPORT_SPREAD_SPREAD_H_
#define THINWIRE_TRANSPORT_SPREAD_SPREAD_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/planes.h"

namespace thinwire {

// Which plane an exchange goes by follows from its tag, so all ranks agree without a word. All
// planes match by tag, block, and are of host memory. A failure of one is that of all.
class Spread final : public DataPlane {
 public:
  // `others`, at least one: each with its own control plane, which only keeps it whole.
  Spread(std::unique_ptr<DataPlane> first, std::vector<Transport> others);

  const Membership& members() const override { return first_->members(); }
  DataTraits traits() const override { return {}; }
  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override;
  std::unique_ptr<Exchange> Expect(uint64_t tag, std::span<const MutableBytes> recv) override;
  const std::shared_ptr<Failure>& failure() const override { return first_->failure(); }
  uint64_t bytes_sent() const override;

 private:
  DataPlane& PlaneFor(uint64_t tag) { return *planes_[tag % planes_.size()]; }

  const std::unique_ptr<DataPlane> first_;
  const std::vector<Transport> others_;
  const std::vector<DataPlane*> planes_;  // all of them
  std::vector<FailureTie> ties_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_SPREAD_SPREAD_H_
