#include "transport/messages/zmq/zmq_messages.h"

#include <sys/resource.h>

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "transport/mesh/tcp.h"
#include "transport/messages/message_box.h"
#include "transport/messages/zmq/zmq_library.h"
#include "transport/messages/zmq/zmq_loop.h"

namespace thinwire {
namespace {

// Libzmq's thread would resolve a name, and serve no connection while it waits for the answer.
absl::Status CheckAddress(int peer, const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon != std::string::npos && absl::SimpleAtoi(address.substr(colon + 1), &port)) {
    std::string host = address.substr(0, colon);
    const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
    if (bracketed) host = host.substr(1, host.size() - 2);
    const bool is_v6 = host.find(':') != std::string::npos;
    if (port > 0 && bracketed == is_v6 && Address::Of(host, port).ok()) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", peer, " has the address '", address,
                   "', expected a numeric one with a port, such as 10.0.0.5:7000"));
}

absl::Status CheckLimits(const MessageLimits& limits) {
  if (limits.credit == 0 || limits.max_message == 0 || limits.max_message > (size_t{1} << 32) - 1 ||
      limits.timeout < std::chrono::milliseconds(20) || limits.timeout > std::chrono::hours(24)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a credit of ", limits.credit, " bytes, messages of ", limits.max_message,
                     " bytes and a timeout of ", limits.timeout.count(),
                     " ms: expected at least 1 byte, less than 4 GiB, and 20 ms to a day"));
  }
  return absl::OkStatus();
}

void RaiseDescriptorLimit() {
  constexpr rlim_t kEnough = rlim_t{1} << 20;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t wanted = std::min(limit.rlim_max, kEnough);
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = wanted;
  setrlimit(RLIMIT_NOFILE, &limit);
}

class ZmqMessages final : public ZmqMessagePlane {
 public:
  ZmqMessages(int rank, const MessageLimits& limits)
      : rank_(rank), box_(rank, limits, [this] { loop_->Wake(); }) {}
  ~ZmqMessages() override {
    if (loop_ != nullptr && box_.Close(Clock::now()).has_value()) loop_->Stop(false);
  }

  absl::Status Open(const ZmqOptions& options, std::shared_ptr<const ZmqLibrary> zmq) {
    auto loop = ZmqLoop::Open(options, std::move(zmq), &box_);
    if (!loop.ok()) return loop.status();
    loop_ = *std::move(loop);
    loop_->Start();
    return absl::OkStatus();
  }

  int rank() const override { return rank_; }
  const std::string& address() const override { return loop_->address(); }
  absl::Status Call(int peer, const std::string& address) override {
    if (absl::Status bad = CheckAddress(peer, address); !bad.ok()) return bad;
    loop_->Call(peer, address);
    return absl::OkStatus();
  }
  absl::Status Send(int peer, int priority, std::string head, std::vector<uint8_t> body) override {
    return box_.Send(peer,
                     {.priority = priority, .head = std::move(head), .body = std::move(body)});
  }
  absl::StatusOr<MessageEvent> Receive(Deadline deadline) override {
    return box_.Receive(deadline);
  }
  uint64_t bytes_sent() const override { return box_.bytes_sent(); }

  absl::Status Close(Deadline deadline) override {
    const std::optional<absl::Status> closed = box_.Close(deadline);
    if (!closed.has_value()) return absl::OkStatus();
    loop_->Stop(true);
    return *closed;
  }

 private:
  const int rank_;
  MessageBox box_;
  std::unique_ptr<ZmqLoop> loop_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ZmqMessagePlane>> StartZmqMessages(const ZmqOptions& options) {
  if (absl::Status bad = CheckLimits(options.limits); !bad.ok()) return bad;
  for (const auto& [peer, address] : options.calls) {
    if (absl::Status bad = CheckAddress(peer, address); !bad.ok()) return bad;
  }
  auto zmq = LoadZmq(options.library);
  if (!zmq.ok()) return zmq.status();
  if (options.listens) RaiseDescriptorLimit();
  auto plane = std::make_unique<ZmqMessages>(options.rank, options.limits);
  if (absl::Status failed = plane->Open(options, *std::move(zmq)); !failed.ok()) return failed;
  return plane;
}

}  // namespace thinwire
