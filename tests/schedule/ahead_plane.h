// AheadPlane: a data plane that benefits from receives started ahead, and counts them.
#ifndef THINWIRE_TESTS_SCHEDULE_AHEAD_PLANE_H_
#define THINWIRE_TESTS_SCHEDULE_AHEAD_PLANE_H_

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "tests/transport/plane_over.h"
#include "transport/planes.h"

namespace thinwire {

struct AheadCounts {
  std::atomic<int> expected{0};
  std::atomic<int> started{0};  // with blocks to send at once
  std::atomic<int> dropped{0};  // expected exchanges that were destroyed before Wait
  bool fails = false;           // every exchange fails in Wait
};

class AheadPlane final : public PlaneOver {
 public:
  // `counts` must outlive the plane.
  AheadPlane(std::unique_ptr<DataPlane> inner, AheadCounts& counts)
      : inner_(std::move(inner)), counts_(counts) {}

  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override {
    ++counts_.started;
    return inner_->Start(tag, send, recv);
  }
  std::unique_ptr<Exchange> Expect(uint64_t tag, std::span<const MutableBytes> recv) override {
    ++counts_.expected;
    return std::make_unique<Expected>(*inner_, tag, recv, counts_);
  }

 private:
  class Expected final : public Exchange {
   public:
    Expected(DataPlane& inner, uint64_t tag, std::span<const MutableBytes> recv,
             AheadCounts& counts)
        : inner_(inner), tag_(tag), recv_(recv.begin(), recv.end()), counts_(counts) {}
    ~Expected() override {
      if (!waited_) ++counts_.dropped;
    }
    void Send(std::span<const Bytes> send) override { sent_ = inner_.Start(tag_, send, recv_); }
    absl::Status Wait(Deadline deadline) override {
      waited_ = true;
      const absl::Status status = sent_->Wait(deadline);
      return counts_.fails ? absl::UnavailableError("a peer is lost") : status;
    }

   private:
    DataPlane& inner_;
    const uint64_t tag_;
    const std::vector<MutableBytes> recv_;
    AheadCounts& counts_;
    bool waited_ = false;
    std::unique_ptr<Exchange> sent_;
  };

  DataPlane& inner() const override { return *inner_; }

  const std::unique_ptr<DataPlane> inner_;
  AheadCounts& counts_;
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_SCHEDULE_AHEAD_PLANE_H_
