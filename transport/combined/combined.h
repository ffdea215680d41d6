// Split and Spread: a data plane that is made of several. These planes, and the one they form,
// match by tag, block, and use host memory. If one of them fails, all of them fail.
#ifndef THINWIRE_TRANSPORT_COMBINED_COMBINED_H_
#define THINWIRE_TRANSPORT_COMBINED_COMBINED_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/planes.h"

namespace thinwire {

// Exchanges blocks inside the rank's node on one plane, and blocks between nodes on another.
class Split final : public DataPlane {
 public:
  // `inside` connects the ranks of this node, which have consecutive ranks in `between`, which
  // connects all ranks. The plane has Expect if `between` has.
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
  const size_t first_, count_;                                     // the ranks of this node
  const Failure::Listener inside_to_between_, between_to_inside_;  // pass failures on
};

// Each exchange runs on one of several planes of the same ranks. Its tag determines which one, so
// the ranks need not agree on it.
//
// One thread moves all bytes of a plane over TCP, and copies them into and out of the kernel. If a
// link is faster than that thread, planes with threads and connections of their own share the work.
class Spread final : public DataPlane {
 public:
  // `others`, at least one: each with its own control plane, which serves only to keep it alive.
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
  const std::vector<DataPlane*> planes_;      // including first_
  std::vector<Failure::Listener> passed_on_;  // from the first plane to the others, and back
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_COMBINED_COMBINED_H_
