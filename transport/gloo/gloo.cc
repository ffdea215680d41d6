#include "transport/gloo/gloo.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "transport/expecting_plane.h"
#include "transport/gloo/gloo_connect.h"
#include "transport/gloo/gloo_control.h"
#include "transport/gloo/gloo_exchange.h"
#include "transport/gloo/gloo_shared.h"

namespace thinwire {
namespace {

class GlooData final : public ExpectingPlane {
 public:
  explicit GlooData(std::shared_ptr<GlooShared> shared) : shared_(std::move(shared)) {}

  const Membership& members() const override { return shared_->members(); }

  std::unique_ptr<Exchange> Expect(uint64_t tag, std::span<const MutableBytes> recv) override {
    auto exchange = std::make_unique<GlooExchange>(shared_, tag, &bytes_sent_);
    exchange->Receive(recv);
    return exchange;
  }

  void Abort(absl::Status reason) override { shared_->Fail(reason); }
  absl::Status status() const override { return shared_->status(); }
  uint64_t bytes_sent() const override { return bytes_sent_; }

 private:
  const std::shared_ptr<GlooShared> shared_;
  std::atomic<uint64_t> bytes_sent_{0};
};

// How long frames get to leave after a failure. A peer that has stopped takes none, and waiting for
// it must not add much to the timeout that it has cost already.
std::chrono::milliseconds PatienceFor(Clock::duration timeout) {
  using std::chrono::milliseconds;
  return std::min(milliseconds(200), std::chrono::duration_cast<milliseconds>(timeout / 30));
}

}  // namespace

absl::StatusOr<Transport> ConnectGloo(const GlooOptions& options) {
  const std::chrono::milliseconds patience = PatienceFor(options.deadline - Clock::now());
  absl::StatusOr<GlooMesh> mesh = ConnectGlooMesh(options);
  if (!mesh.ok()) return mesh.status();
  const absl::Status incomplete = mesh->incomplete;
  const auto shared = std::make_shared<GlooShared>(*std::move(mesh));
  Transport transport(std::make_unique<GlooControl>(shared, patience),
                      std::make_unique<GlooData>(shared));
  if (incomplete.ok()) return transport;
  transport.control->Abort(incomplete);
  if (options.last_words) transport.control->SendToAll(options.last_words(incomplete));
  return incomplete;
}

}  // namespace thinwire
