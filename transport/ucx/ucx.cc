#include "transport/ucx/ucx.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "transport/planes.h"
#include "transport/ucx/ucx_library.h"
#include "transport/ucx/ucx_worker.h"

namespace thinwire {
namespace {

class UcxData final : public DataPlane {
 public:
  UcxData(const UcxOptions& options, std::unique_ptr<UcxWorker> worker)
      : worker_(std::move(worker)),
        members_(options.members),
        first_(options.first),
        driver_(*worker_) {}

  const Membership& members() const override { return members_; }
  DataTraits traits() const override { return {}; }

  std::unique_ptr<Exchange> Expect(uint64_t tag, std::span<const MutableBytes> recv) override;
  const std::shared_ptr<Failure>& failure() const override { return driver_.failure(); }
  uint64_t bytes_sent() const override { return bytes_sent_; }

  absl::Status Connect(const std::vector<std::string>& addresses);
  // Endpoints connect with their first message.
  absl::Status Greet(Deadline deadline);

  // For its exchanges.
  UcxWorker& worker() { return *worker_; }
  UcxDriver& driver() { return driver_; }
  void Count(size_t bytes) { bytes_sent_ += bytes; }
  int InGroup(int member) const { return first_ + member; }

 private:
  const std::unique_ptr<UcxWorker> worker_;
  const Membership members_;
  const int first_;  // the group's rank of the members' rank 0, for messages
  UcxDriver driver_;
  std::atomic<uint64_t> bytes_sent_{0};
};

// The blocks of one exchange, as tagged messages.
class UcxExchange final : public Exchange {
 public:
  UcxExchange(UcxData& plane, uint64_t tag);
  ~UcxExchange() override;

  void Receive(std::span<const MutableBytes> recv);  // call once, before Send
  void Send(std::span<const Bytes> send) override;
  absl::Status Wait(Deadline deadline) override;

 private:
  // A message under way. Callbacks get its address, so it never moves.
  struct Message {
    UcxExchange* exchange;
    int peer;
    bool is_receive;
    void* request = nullptr;
  };

  Message& Begin(int peer, bool is_receive);
  void Began(Message& message, ucs_status_ptr_t request);
  void End(const Message& message, ucs_status_t status);
  void EndOne();
  // Cancels what has not ended. No thread may be inside Progress.
  void Cancel();
  absl::Status Late() const;

  UcxData& plane_;
  const uint64_t tag_;
  std::vector<Message> messages_;  // room for all is reserved at the start
  std::atomic<int> open_{1};       // messages, and Send itself
  UcxDriver::Flag done_{false};
  bool waited_ = false;
};

// UCX matches messages by their tag alone, whoever sent them. So the sender is part of the tag, and
// so is the size: blocks that disagree never match.
uint64_t UcxTagOf(uint64_t tag, int from, size_t bytes) {
  uint64_t mixed = (tag ^ (bytes * 0x9e3779b97f4a7c15ULL)) * 0xff51afd7ed558ccdULL;
  mixed ^= mixed >> 32;
  mixed = (mixed + static_cast<uint64_t>(from)) * 0xc4ceb9fe1a85ec53ULL;
  return mixed ^ (mixed >> 29);
}

UcxExchange::UcxExchange(UcxData& plane, uint64_t tag) : plane_(plane), tag_(tag) {
  messages_.reserve(3 * plane.size());
}

UcxExchange::~UcxExchange() {
  if (waited_) return;
  plane_.failure()->Fail(absl::InternalError("an exchange was dropped before it was waited for"));
  plane_.driver().Await(done_, Clock::now()).IgnoreError();
  Cancel();
}

void UcxExchange::Receive(std::span<const MutableBytes> recv) {
  if (plane_.failure()->failed()) return;
  const auto [rank, size] = plane_.members();
  const auto ended = [](void*, ucs_status_t status, const ucp_tag_recv_info_t*, void* arg) {
    auto& message = *static_cast<Message*>(arg);
    message.exchange->End(message, status);
  };
  for (int i = 1; i < size; ++i) {
    const int from = (rank + size - i) % size;
    if (recv[from].empty()) continue;
    Message& message = Begin(from, true);
    Began(message, plane_.worker().Receive(UcxTagOf(tag_, from, recv[from].size()), recv[from],
                                           ended, &message));
  }
}

void UcxExchange::Send(std::span<const Bytes> send) {
  const auto [rank, size] = plane_.members();
  const auto ended = [](void*, ucs_status_t status, void* arg) {
    auto& message = *static_cast<Message*>(arg);
    message.exchange->End(message, status);
  };
  for (int i = 1; i < size; ++i) {  // each rank begins with a different peer
    if (plane_.failure()->failed()) break;
    const int to = (rank + i) % size;
    if (send[to].empty()) continue;
    Message& message = Begin(to, false);
    Began(message, plane_.worker().Send(to, UcxTagOf(tag_, rank, send[to].size()), send[to], ended,
                                        &message));
    plane_.Count(send[to].size());
  }
  EndOne();
  if (!done_.load()) plane_.driver().Nudge();
}

absl::Status UcxExchange::Wait(Deadline deadline) {
  waited_ = true;
  absl::Status status = plane_.driver().Await(done_, deadline);
  if (absl::IsDeadlineExceeded(status) && !plane_.failure()->failed()) {
    plane_.failure()->Fail(Late());
    status = plane_.driver().Await(done_, deadline);
  }
  Cancel();
  return status;
}

UcxExchange::Message& UcxExchange::Begin(int peer, bool is_receive) {
  ++open_;
  return messages_.emplace_back(Message{this, peer, is_receive});
}

void UcxExchange::Began(Message& message, ucs_status_ptr_t request) {
  if (UCS_PTR_IS_PTR(request)) {
    message.request = request;
  } else {
    End(message, UCS_PTR_STATUS(request));
  }
}

void UcxExchange::End(const Message& message, ucs_status_t status) {
  if (status == UCS_OK) return EndOne();
  if (status == UCS_ERR_CANCELED) return;
  plane_.failure()->Fail(absl::UnavailableError(
      absl::StrCat("rank ", plane_.InGroup(message.peer), " is gone: its transfer with rank ",
                   plane_.InGroup(plane_.rank()), " failed (",
                   plane_.worker().ucx().status_string(status), "); look why that process ended")));
}

void UcxExchange::EndOne() {
  if (open_.fetch_sub(1, std::memory_order_acq_rel) == 1) plane_.driver().Complete(done_);
}

// UCX makes no callback for a request that is freed, and forgets the block of a cancelled receive.
void UcxExchange::Cancel() {
  for (Message& message : messages_) {
    if (message.request == nullptr) continue;
    plane_.worker().Release(message.request, message.is_receive);
    message.request = nullptr;
  }
}

absl::Status UcxExchange::Late() const {
  std::set<int> missing;
  for (const Message& message : messages_) {
    if (message.request != nullptr && !plane_.worker().HasEnded(message.request)) {
      missing.insert(plane_.InGroup(message.peer));
    }
  }
  return absl::DeadlineExceededError(absl::StrCat(
      "rank ", plane_.InGroup(plane_.rank()), " waited past its deadline for rank ",
      absl::StrJoin(missing, ", "), "; look what that rank does, or raise the timeout"));
}

// A block whose receive is already posted is copied once, not twice.
std::unique_ptr<Exchange> UcxData::Expect(uint64_t tag, std::span<const MutableBytes> recv) {
  auto exchange = std::make_unique<UcxExchange>(*this, tag);
  exchange->Receive(recv);
  return exchange;
}

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
  // A rank without an address passes the reason, so that the others do not wait for it.
  const absl::StatusOr<std::vector<std::string>> addresses =
      options.tell(worker.ok() ? (*worker)->Address() : worker.status());
  if (!worker.ok()) return worker.status();
  if (!addresses.ok()) return addresses.status();
  auto plane = std::make_unique<UcxData>(options, *std::move(worker));
  if (absl::Status bad = plane->Connect(*addresses); !bad.ok()) return bad;
  const Failure::Listener hears_of_lost_peers = options.control.failure()->PassOn(plane->failure());
  if (absl::Status bad = plane->Greet(options.deadline); !bad.ok()) return bad;
  return plane;
}

}  // namespace thinwire
