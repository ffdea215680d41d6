#include "transport/gloo/gloo.h"

#include <atomic>
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

}  // namespace

absl::StatusOr<Transport> ConnectGloo(const GlooOptions& options) {
  absl::StatusOr<GlooMesh> mesh = ConnectFullMesh(options);
  if (!mesh.ok()) return mesh.status();
  const auto shared = std::make_shared<GlooShared>(*std::move(mesh));
  return Transport(std::make_unique<GlooControl>(shared), std::make_unique<GlooData>(shared));
}

}  // namespace thinwire
