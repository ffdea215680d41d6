#include "transport/gloo/gloo_planes.h"

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/gloo/gloo_links.h"
#include "transport/store.h"

namespace thinwire {
namespace {

// Gloo matches messages by slot alone and aborts the process when a matched message is
// larger than its receive. So the size is part of the slot: what disagrees never meets.
uint64_t SlotOf(uint64_t tag, size_t bytes) {
  uint64_t slot = (tag ^ (bytes * 0x9e3779b97f4a7c15ULL)) * 0xff51afd7ed558ccdULL;
  slot ^= slot >> 32;
  return slot | 1;  // even slots are those of frames
}

}  // namespace

GlooExchange::GlooExchange(std::shared_ptr<GlooLinks> links, uint64_t tag,
                           std::atomic<uint64_t>* bytes_sent)
    : links_(std::move(links)), tag_(tag), bytes_sent_(bytes_sent) {}

GlooExchange::~GlooExchange() {
  if (waited_) return;
  links_->failure().Fail(absl::InternalError("an exchange was dropped before it was waited for"));
  links_->AwaitEnd();
}

void GlooExchange::Add(std::vector<Block>& blocks, int peer, MutableBytes bytes) {
  const bool parcel = GlooPeer::TakesParcel(bytes.size(), links_->members().size);
  blocks.push_back(
      {peer, bytes,
       parcel ? nullptr : links_->context().createUnboundBuffer(bytes.data(), bytes.size())});
}

void GlooExchange::Receive(std::span<const MutableBytes> recv) {
  const auto [rank, size] = links_->members();
  for (int i = 1; i < size; ++i) {
    const int from = (rank + size - i) % size;
    if (!recv[from].empty()) Add(receives_, from, recv[from]);
  }
  links_->loop().Post([this] { StartReceives(); });
}

void GlooExchange::Send(std::span<const Bytes> send) {
  const auto [rank, size] = links_->members();
  for (int i = 1; i < size; ++i) {  // every rank begins with another peer
    const int to = (rank + i) % size;
    if (send[to].empty()) continue;
    Add(sends_, to, {const_cast<uint8_t*>(send[to].data()), send[to].size()});
    *bytes_sent_ += send[to].size();
  }
  links_->loop().Post([this] { StartSends(); });
}

void GlooExchange::StartReceives() { Start(receives_, false); }

void GlooExchange::StartSends() {
  all_started_ = true;
  Start(sends_, true);
}

// The exchange may be gone when this returns.
void GlooExchange::Start(std::vector<Block>& blocks, bool outgoing) {
  if (!links_->Join(this)) return OnFailure();
  under_way_ += blocks.size() + 1;  // nobody ends it in the midst of this
  for (const Block& block : blocks) {
    try {
      StartBlock(block, outgoing);
    } catch (const std::exception&) {
      // The connection is closed, which its peer is told and ends the block by.
    }
  }
  // Messages that found their receive and room in the socket have left by now.
  for (const Block& block : blocks) {
    if (outgoing && block.buffer != nullptr) links_->peer(block.peer)->CollectMessages();
  }
  OnBlockEnded(absl::OkStatus());
}

void GlooExchange::StartBlock(const Block& block, bool outgoing) {
  GlooPeer& peer = *links_->peer(block.peer);
  if (peer.lost()) return OnBlockEnded(links_->failure().peer_reason(block.peer));
  const uint64_t slot = SlotOf(tag_, block.bytes.size());
  if (block.buffer == nullptr) {
    if (outgoing) return peer.SendParcel(slot, block.bytes, this);
    return peer.ReceiveParcel(slot, block.bytes, this);
  }
  if (outgoing) return peer.SendMessage(slot, *block.buffer, this);
  peer.ReceiveMessage(slot, *block.buffer, this);
}

void GlooExchange::OnBlockEnded(const absl::Status& status) {
  status_.Update(status);
  if (--under_way_ == 0 && all_started_) End();
}

// Without their buffers the connections can't touch the blocks any more. Until the sends are posted
// their caller may be at them, and hears of the failure once they are.
void GlooExchange::OnFailure() {
  receives_.clear();
  under_way_ = 0;
  if (!all_started_) return;
  sends_.clear();
  status_ = links_->failure().reason();
  End();
}

// The last that the loop has to do with this exchange.
void GlooExchange::End() {
  links_->Leave(this);
  const absl::MutexLock lock(&mu_);
  ended_ = true;
  end_.Signal();
}

bool GlooExchange::HasEndedBy(Deadline deadline) {
  const absl::MutexLock lock(&mu_);
  while (!ended_ && Clock::now() < deadline) end_.WaitWithTimeout(&mu_, TimeLeft(deadline));
  return ended_;
}

absl::Status GlooExchange::Wait(Deadline deadline) {
  waited_ = true;
  if (!HasEndedBy(deadline)) {
    links_->failure().Fail(absl::DeadlineExceededError(
        absl::StrCat("rank ", links_->members().rank, " waited past its deadline for its peers")));
    HasEndedBy(Deadline::max());
  }
  return status_;
}

namespace {

class GlooData final : public DataPlane {
 public:
  explicit GlooData(std::shared_ptr<GlooLinks> links) : links_(std::move(links)) {}

  const Membership& members() const override { return links_->members(); }
  DataTraits traits() const override { return {}; }
  std::unique_ptr<Exchange> Expect(uint64_t tag, std::span<const MutableBytes> recv) override {
    auto exchange = std::make_unique<GlooExchange>(links_, tag, &bytes_sent_);
    exchange->Receive(recv);
    return exchange;
  }
  const std::shared_ptr<Failure>& failure() const override { return links_->shared_failure(); }
  uint64_t bytes_sent() const override { return bytes_sent_; }

 private:
  const std::shared_ptr<GlooLinks> links_;
  std::atomic<uint64_t> bytes_sent_{0};
};

class GlooControl final : public ControlPlane {
 public:
  GlooControl(std::shared_ptr<GlooLinks> links, std::chrono::milliseconds last_words)
      : links_(std::move(links)), last_words_(last_words) {}
  ~GlooControl() override {
    links_->failure().Fail(absl::CancelledError("the transport was destroyed"));
    links_->Drain(Clock::now() + last_words_);
    links_->Close();
  }

  const Membership& members() const override { return links_->members(); }
  absl::Status Send(int to, const ControlFrame& frame) override {
    if (GlooPeer* const peer = links_->peer(to)) peer->SendFrame(frame);
    return links_->failure().peer_reason(to);
  }
  absl::StatusOr<ControlMessage> Receive() override { return links_->ReceiveFrame(); }
  void Flush(Deadline deadline) override {
    if (links_->failure().failed()) links_->Drain(deadline);
  }
  const std::shared_ptr<Failure>& failure() const override { return links_->shared_failure(); }

 private:
  const std::shared_ptr<GlooLinks> links_;
  const std::chrono::milliseconds last_words_;
};

}  // namespace

Transport GlooPlanes(const std::shared_ptr<GlooLinks>& links,
                     std::chrono::milliseconds last_words) {
  return {std::make_unique<GlooControl>(links, last_words), std::make_unique<GlooData>(links)};
}

}  // namespace thinwire
