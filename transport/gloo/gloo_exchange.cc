#include "transport/gloo/gloo_exchange.h"

#include <exception>
#include <utility>

namespace thinwire {
namespace {

// Gloo matches messages by slot alone and aborts the process when a matched message has another
// size. So the size is part of the slot: what disagrees never meets.
uint64_t SlotOf(uint64_t tag, size_t bytes) {
  uint64_t slot = (tag ^ (bytes * 0x9e3779b97f4a7c15ULL)) * 0xff51afd7ed558ccdULL;
  slot ^= slot >> 32;
  return slot | 1;  // even slots are the control plane's
}

}  // namespace

void GlooExchange::Batch::Add(int peer, void* data, size_t bytes) {
  blocks_.push_back({peer, SlotOf(exchange_.tag_, bytes),
                     exchange_.shared_->context().createUnboundBuffer(data, bytes)});
}

void GlooExchange::Batch::Post() {
  posted_ = true;
  exchange_.shared_->loop().Post(this);
}

// The waiter may be done, and destroy the exchange, as soon as `ran_` is true.
void GlooExchange::Batch::Run() {
  try {
    for (const Block& block : blocks_) start_(block);
  } catch (const std::exception& error) {  // the connection is closed
    broken_ = error.what();
    for (const Block& block : exchange_.receives_.blocks_) block.buffer->abortWaitRecv();
    for (const Block& block : blocks_) block.buffer->abortWaitSend();
  }
  ran_.store(true, std::memory_order_release);
}

GlooExchange::GlooExchange(std::shared_ptr<GlooShared> shared, uint64_t tag,
                           std::atomic<uint64_t>* bytes_sent)
    : shared_(std::move(shared)),
      tag_(tag),
      bytes_sent_(bytes_sent),
      receives_(*this, [](const Block& block) { block.buffer->recv(block.peer, block.slot); }),
      sends_(*this, [](const Block& block) { block.buffer->send(block.peer, block.slot); }) {}

GlooExchange::~GlooExchange() {
  if (waited_) return;
  shared_->Fail(absl::InternalError("an exchange was dropped before it was waited for"));
  AwaitLoop();
}

void GlooExchange::Receive(std::span<const MutableBytes> recv) {
  const auto [rank, size] = shared_->members();
  for (int i = 1; i < size; ++i) {
    const int from = (rank + size - i) % size;
    if (!recv[from].empty()) receives_.Add(from, recv[from].data(), recv[from].size());
  }
  receives_.Post();
}

void GlooExchange::Send(std::span<const Bytes> send) {
  const auto [rank, size] = shared_->members();
  for (int i = 1; i < size; ++i) {  // every rank begins with another peer
    const int to = (rank + i) % size;
    if (send[to].empty()) continue;
    sends_.Add(to, const_cast<uint8_t*>(send[to].data()), send[to].size());
    *bytes_sent_ += send[to].size();
  }
  sends_.Post();
}

absl::Status GlooExchange::Wait(Deadline deadline) {
  waited_ = true;
  bool done = true;
  for (const Block& block : receives_.blocks()) {
    done = done && shared_->Guarded(block.buffer.get(),
                                    [&] { return block.buffer->waitRecv(Until(deadline)); });
  }
  for (const Block& block : sends_.blocks()) {
    done = done && shared_->Guarded(block.buffer.get(),
                                    [&] { return block.buffer->waitSend(Until(deadline)); });
  }
  AwaitLoop();
  if (done) return absl::OkStatus();
  for (const Batch* batch : {&receives_, &sends_}) {
    if (!batch->broken().empty()) shared_->FailBroken(batch->broken());
  }
  // Without their buffers the connections can't touch the blocks any more.
  receives_.Release();
  sends_.Release();
  return shared_->status();
}

// The loop is done with a start nearly always before what it started is.
void GlooExchange::AwaitLoop() {
  if (!receives_.settled() || !sends_.settled()) shared_->loop().Sync();
}

}  // namespace thinwire
