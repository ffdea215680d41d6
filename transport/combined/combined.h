// Split and Spread: a data plane that is made of several. All of these match by tag, block, and are
// of host memory, and so is what they make. A failure of one is that of all.
#ifndef THINWIRE_TRANSPORT_COMBINED_COMBINED_H_
#define THINWIRE_TRANSPORT_COMBINED_COMBINED_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/planes.h"

namespace thinwire {

// Blocks go by one plane inside the rank's node, and by another one between nodes.
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
  const size_t first_, count_;                                     // the ranks of this node
  const Failure::Listener inside_to_between_, between_to_inside_;  // of a failure
};

// Each exchange runs on one of several planes of the same ranks. Which one follows from its tag, so
// all ranks agree without a word.
//
// One thread moves all bytes of a plane over TCP, and copies them in and out of the kernel. Where a
// link is faster than that thread, planes with threads and connections of their own share the work.
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
  const std::vector<DataPlane*> planes_;      // all of them
  std::vector<Failure::Listener> passed_on_;  // from the first plane to the others, and back
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_COMBINED_COMBINED_H_
