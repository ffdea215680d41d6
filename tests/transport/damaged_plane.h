// A data plane for tests that damages what it received, like a broken network card or memory.
#ifndef THINWIRE_TESTS_TRANSPORT_DAMAGED_PLANE_H_
#define THINWIRE_TESTS_TRANSPORT_DAMAGED_PLANE_H_

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tests/transport/plane_over.h"
#include "transport/planes.h"

namespace thinwire {

// Changes blocks that were just received; they are by rank.
using Damage = std::function<void(std::span<const MutableBytes>)>;

// Flips a bit of rank `from`'s block, in the exchange that ends as number `at`, counted from 0.
inline Damage FlippedBit(int from, int at) {
  const auto left = std::make_shared<std::atomic<int>>(at);
  return [from, left](std::span<const MutableBytes> received) {
    const MutableBytes block = received[from];
    if ((*left)-- == 0) block[block.size() / 2] ^= 0x40;
  };
}

class DamagedPlane final : public PlaneOver {
 public:
  DamagedPlane(std::unique_ptr<DataPlane> inner, Damage damage)
      : inner_(std::move(inner)), damage_(std::move(damage)) {}

  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override {
    return Damaged(inner_->Start(tag, send, recv), recv);
  }
  std::unique_ptr<Exchange> Expect(uint64_t tag, std::span<const MutableBytes> recv) override {
    return Damaged(inner_->Expect(tag, recv), recv);
  }

 private:
  class InFlight final : public Exchange {
   public:
    InFlight(std::unique_ptr<Exchange> inner, std::span<const MutableBytes> recv, Damage damage)
        : inner_(std::move(inner)), recv_(recv.begin(), recv.end()), damage_(std::move(damage)) {}
    void Send(std::span<const Bytes> send) override { inner_->Send(send); }
    absl::Status Wait(Deadline deadline) override {
      const absl::Status status = inner_->Wait(deadline);
      if (status.ok()) damage_(recv_);
      return status;
    }
    void OnDone(std::function<void(absl::Status)> done) override {
      inner_->OnDone([recv = recv_, damage = damage_, done](const absl::Status& status) {
        if (status.ok()) damage(recv);
        done(status);
      });
    }

   private:
    const std::unique_ptr<Exchange> inner_;
    const std::vector<MutableBytes> recv_;
    const Damage damage_;
  };

  DataPlane& inner() const override { return *inner_; }

  std::unique_ptr<Exchange> Damaged(std::unique_ptr<Exchange> exchange,
                                    std::span<const MutableBytes> recv) {
    if (exchange == nullptr) return nullptr;
    return std::make_unique<InFlight>(std::move(exchange), recv, damage_);
  }

  const std::unique_ptr<DataPlane> inner_;
  const Damage damage_;
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_DAMAGED_PLANE_H_
