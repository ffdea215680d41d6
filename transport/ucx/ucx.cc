#include "transport/ucx/ucx.h"

#include <atomic>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "transport/ucx/ucx_driver.h"
#include "transport/ucx/ucx_exchange.h"
#include "transport/ucx/ucx_library.h"
#include "transport/ucx/ucx_worker.h"

namespace thinwire {
namespace {

class UcxData final : public DataPlane {
 public:
  UcxData(const UcxOptions& options, std::unique_ptr<UcxWorker> worker)
      : worker_(std::move(worker)),
        driver_(*worker_, Failure::Make()),
        parts_{options.members, options.first, *worker_, driver_, bytes_sent_} {}

  const Membership& members() const override { return parts_.members; }
  DataTraits traits() const override { return {}; }

  // A block that finds its receive is copied once, not twice.
  std::unique_ptr<Exchange> Expect(uint64_t tag, std::span<const MutableBytes> recv) override {
    auto exchange = std::make_unique<UcxExchange>(parts_, tag);
    exchange->Receive(recv);
    return exchange;
  }

  const std::shared_ptr<Failure>& failure() const override { return driver_.failure(); }
  uint64_t bytes_sent() const override { return bytes_sent_; }

  absl::Status Connect(const std::vector<std::string>& addresses);
  // Endpoints connect with their first message.
  absl::Status Greet(Deadline deadline);

 private:
  const std::unique_ptr<UcxWorker> worker_;
  UcxDriver driver_;
  std::atomic<uint64_t> bytes_sent_{0};
  const UcxPlaneParts parts_;
};

absl::Status UcxData::Connect(const std::vector<std::string>& addresses) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    if (absl::Status bad = worker_->Connect(peer, addresses[peer]); !bad.ok()) return bad;
  }
  return absl::OkStatus();
}

absl::Status UcxData::Greet(Deadline deadline) {
  constexpr uint64_t kGreeting = ~uint64_t{0};
  const std::vector<uint8_t> out(8);
  std::vector<std::vector<uint8_t>> in(size(), std::vector<uint8_t>(8));
  const std::vector<MutableBytes> recv(in.begin(), in.end());
  const absl::Status status =
      Start(kGreeting, std::vector<Bytes>(size(), out), recv)->Wait(deadline);
  bytes_sent_ = 0;
  return status;
}

absl::StatusOr<std::unique_ptr<UcxWorker>> MakeWorker(const UcxOptions& options) {
  absl::StatusOr<std::shared_ptr<const UcxLibrary>> ucx = LoadUcx(options.library);
  if (!ucx.ok()) return ucx.status();
  return UcxWorker::Make(*std::move(ucx), options.members.size);
}

}  // namespace

absl::StatusOr<std::string> UcxVersion(const std::string& library) {
  const absl::StatusOr<std::shared_ptr<const UcxLibrary>> ucx = LoadUcx(library);
  if (!ucx.ok()) return ucx.status();
  return (*ucx)->version;
}

absl::StatusOr<std::unique_ptr<DataPlane>> ConnectUcx(const UcxOptions& options) {
  absl::StatusOr<std::unique_ptr<UcxWorker>> worker = MakeWorker(options);
  // A rank that has no address says why, so that the others do not wait for it.
  const absl::StatusOr<std::vector<std::string>> addresses =
      options.tell(worker.ok() ? (*worker)->Address() : worker.status());
  if (!worker.ok()) return worker.status();
  if (!addresses.ok()) return addresses.status();
  auto plane = std::make_unique<UcxData>(options, *std::move(worker));
  if (absl::Status bad = plane->Connect(*addresses); !bad.ok()) return bad;
  const Failure::Listener hears_of_lost_peers =
      FailureTie::PassOn(*options.control.failure(), plane->failure());
  if (absl::Status bad = plane->Greet(options.deadline); !bad.ok()) return bad;
  return plane;
}

}  // namespace thinwire
