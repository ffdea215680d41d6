// Both planes of a rank over its GlooLinks. GlooExchange: the blocks of one exchange, as Gloo's
// messages or as parcels.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_PLANES_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_PLANES_H_

#include <gloo/transport/unbound_buffer.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "transport/gloo/gloo_links.h"
#include "transport/planes.h"

namespace thinwire {

// Gloo's loop starts the blocks, in two batches, and sees them end. If a peer is lost without which
// the group goes on, the exchange ends with that reason once its other blocks have ended.
class GlooExchange final : public Exchange, private BlockOwner {
 public:
  // `bytes_sent` counts, and outlives this.
  GlooExchange(std::shared_ptr<GlooLinks> links, uint64_t tag, std::atomic<uint64_t>* bytes_sent);
  ~GlooExchange() override;

  void Receive(std::span<const MutableBytes> recv);  // before Send
  void Send(std::span<const Bytes> send) override;
  absl::Status Wait(Deadline deadline) override;

 private:
  struct Block {
    int peer;
    MutableBytes bytes;
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;  // null: a parcel
  };

  void Add(std::vector<Block>& blocks, int peer, MutableBytes bytes);

  // On the loop's thread:
  void StartReceives();
  void StartSends();
  void Start(std::vector<Block>& blocks, bool outgoing);
  void StartBlock(const Block& block, bool outgoing);
  void OnBlockEnded(const absl::Status& status) override;
  void OnFailure() override;
  void End();

  bool HasEndedBy(Deadline deadline);

  const std::shared_ptr<GlooLinks> links_;
  const uint64_t tag_;
  std::atomic<uint64_t>* const bytes_sent_;
  bool waited_ = false;

  // The loop's thread's from the post of their start on.
  std::vector<Block> receives_, sends_;
  size_t under_way_ = 0;
  bool all_started_ = false;

  absl::Status status_;  // the loop's thread's until the exchange has ended
  absl::Mutex mu_;
  absl::CondVar end_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

// last_words: how long the destruction of the control plane, which closes the connections, waits
// after a failure for frames that have not left.
Transport GlooPlanes(const std::shared_ptr<GlooLinks>& links, std::chrono::milliseconds last_words);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_PLANES_H_
