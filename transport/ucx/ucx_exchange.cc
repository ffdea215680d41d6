#include "transport/ucx/ucx_exchange.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace thinwire {
namespace {

// UCX matches messages by their tag alone, whoever sent them. So the sender is part of the tag, and
// so is the size: what disagrees never meets.
uint64_t UcxTagOf(uint64_t tag, int from, size_t bytes) {
  uint64_t mixed = (tag ^ (bytes * 0x9e3779b97f4a7c15ULL)) * 0xff51afd7ed558ccdULL;
  mixed ^= mixed >> 32;
  mixed = (mixed + static_cast<uint64_t>(from)) * 0xc4ceb9fe1a85ec53ULL;
  return mixed ^ (mixed >> 29);
}

}  // namespace

UcxExchange::UcxExchange(const UcxPlaneParts& plane, uint64_t tag) : plane_(plane), tag_(tag) {
  messages_.reserve(3 * plane.members.size);
}

UcxExchange::~UcxExchange() {
  if (waited_) return;
  plane_.driver.failure()->Fail(
      absl::InternalError("an exchange was dropped before it was waited for"));
  plane_.driver.Await(done_, Clock::now()).IgnoreError();
  Cancel();
}

void UcxExchange::Receive(std::span<const MutableBytes> recv) {
  if (plane_.driver.failure()->failed()) return;
  const auto [rank, size] = plane_.members;
  const auto ended = [](void*, ucs_status_t status, const ucp_tag_recv_info_t*, void* arg) {
    auto& message = *static_cast<Message*>(arg);
    message.exchange->End(message, status);
  };
  for (int i = 1; i < size; ++i) {
    const int from = (rank + size - i) % size;
    if (recv[from].empty()) continue;
    Message& message = Begin(from, true);
    Began(message, plane_.worker.Receive(UcxTagOf(tag_, from, recv[from].size()), recv[from], ended,
                                         &message));
  }
}

void UcxExchange::Send(std::span<const Bytes> send) {
  const auto [rank, size] = plane_.members;
  const auto ended = [](void*, ucs_status_t status, void* arg) {
    auto& message = *static_cast<Message*>(arg);
    message.exchange->End(message, status);
  };
  for (int i = 1; i < size; ++i) {  // all begin with another peer
    if (plane_.driver.failure()->failed()) break;
    const int to = (rank + i) % size;
    if (send[to].empty()) continue;
    Message& message = Begin(to, false);
    Began(message,
          plane_.worker.Send(to, UcxTagOf(tag_, rank, send[to].size()), send[to], ended, &message));
    plane_.bytes_sent += send[to].size();
  }
  EndOne();
  if (!done_.load()) plane_.driver.Nudge();
}

absl::Status UcxExchange::Wait(Deadline deadline) {
  waited_ = true;
  absl::Status status = plane_.driver.Await(done_, deadline);
  if (absl::IsDeadlineExceeded(status) && !plane_.driver.failure()->failed()) {
    plane_.driver.failure()->Fail(Late());
    status = plane_.driver.Await(done_, deadline);
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
  plane_.driver.failure()->Fail(absl::UnavailableError(
      absl::StrCat("rank ", InGroup(message.peer), " is gone: its transfer with rank ",
                   InGroup(plane_.members.rank), " failed (",
                   plane_.worker.ucx().status_string(status), "); look why that process ended")));
}

void UcxExchange::EndOne() {
  if (open_.fetch_sub(1, std::memory_order_acq_rel) == 1) plane_.driver.Complete(done_);
}

// UCX calls nobody back about a request that is freed, and forgets the block of a receive that is
// cancelled.
void UcxExchange::Cancel() {
  for (Message& message : messages_) {
    if (message.request == nullptr) continue;
    plane_.worker.Release(message.request, message.is_receive);
    message.request = nullptr;
  }
}

absl::Status UcxExchange::Late() const {
  std::set<int> missing;
  for (const Message& message : messages_) {
    if (message.request != nullptr && !plane_.worker.HasEnded(message.request)) {
      missing.insert(InGroup(message.peer));
    }
  }
  return absl::DeadlineExceededError(absl::StrCat(
      "rank ", InGroup(plane_.members.rank), " waited past its deadline for rank ",
      absl::StrJoin(missing, ", "), "; look what that rank does, or raise the timeout"));
}

}  // namespace thinwire
