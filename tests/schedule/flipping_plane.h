// FlippingPlane: a data plane that flips one bit of what it receives in one exchange, as a faulty
// memory or switch would.
#ifndef THINWIRE_TESTS_SCHEDULE_FLIPPING_PLANE_H_
#define THINWIRE_TESTS_SCHEDULE_FLIPPING_PLANE_H_

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "transport/data_plane.h"

namespace thinwire {

class FlippingPlane final : public DataPlane {
 public:
  // Flips in the exchange number `at`, from 0, in the last byte that comes from rank 0.
  FlippingPlane(std::unique_ptr<DataPlane> inner, int at) : inner_(std::move(inner)), at_(at) {}

  const Membership& members() const override { return inner_->members(); }
  DataTraits traits() const override { return inner_->traits(); }
  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override {
    std::unique_ptr<Exchange> exchange = inner_->Start(tag, send, recv);
    if (started_++ != at_) return exchange;
    return std::make_unique<Flipped>(std::move(exchange), recv[0]);
  }
  void Abort(absl::Status reason) override { inner_->Abort(std::move(reason)); }
  absl::Status status() const override { return inner_->status(); }
  uint64_t bytes_sent() const override { return inner_->bytes_sent(); }

 private:
  class Flipped final : public Exchange {
   public:
    Flipped(std::unique_ptr<Exchange> inner, MutableBytes bytes)
        : inner_(std::move(inner)), bytes_(bytes) {}
    absl::Status Wait(Deadline deadline) override {
      const absl::Status status = inner_->Wait(deadline);
      if (status.ok()) bytes_[bytes_.size() - 1] ^= 1;
      return status;
    }

   private:
    const std::unique_ptr<Exchange> inner_;
    const MutableBytes bytes_;
  };

  const std::unique_ptr<DataPlane> inner_;
  const int at_;
  std::atomic<int> started_{0};
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_SCHEDULE_FLIPPING_PLANE_H_
