// GlooExchange: the blocks of one exchange, as Gloo's messages.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_EXCHANGE_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_EXCHANGE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "transport/data_plane.h"
#include "transport/gloo/gloo_shared.h"

namespace thinwire {

// The caller makes the blocks' buffers; Gloo's loop starts them, in two batches.
class GlooExchange final : public Exchange {
 public:
  // `bytes_sent` counts, and outlives this.
  GlooExchange(std::shared_ptr<GlooShared> shared, uint64_t tag, std::atomic<uint64_t>* bytes_sent);
  ~GlooExchange() override;

  void Receive(std::span<const MutableBytes> recv);  // before Send
  void Send(std::span<const Bytes> send) override;
  absl::Status Wait(Deadline deadline) override;

 private:
  using UnboundBuffer = GlooShared::UnboundBuffer;

  struct Block {
    int peer;
    uint64_t slot;
    std::unique_ptr<UnboundBuffer> buffer;
  };

  // What the loop starts at once. Its blocks are the loop's from Post on until it has run.
  class Batch final : public GlooLoop::Task {
   public:
    using Starter = void (*)(const Block& block);

    Batch(GlooExchange& exchange, Starter start) : exchange_(exchange), start_(start) {}

    void Add(int peer, void* data, size_t bytes);
    void Post();
    void Run() override;
    const std::vector<Block>& blocks() const { return blocks_; }
    void Release() { blocks_.clear(); }
    // Whether the loop is done with it.
    bool settled() const { return !posted_ || ran_.load(std::memory_order_acquire); }
    const std::string& broken() const { return broken_; }

   private:
    GlooExchange& exchange_;
    const Starter start_;
    std::vector<Block> blocks_;
    bool posted_ = false;
    std::string broken_;  // why it could not be started
    std::atomic<bool> ran_{false};
  };

  void AwaitLoop();

  const std::shared_ptr<GlooShared> shared_;
  const uint64_t tag_;
  std::atomic<uint64_t>* const bytes_sent_;
  Batch receives_, sends_;
  bool waited_ = false;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_EXCHANGE_H_
