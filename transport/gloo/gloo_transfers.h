// GlooTransfers: the blocks that are on their way by Gloo's connections, and who hears of their
// ends. Gloo itself tells only threads that wait, one for each buffer.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_TRANSFERS_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_TRANSFERS_H_

#include <gloo/transport/unbound_buffer.h>

#include <memory>
#include <unordered_set>
#include <vector>

#include "transport/gloo/gloo_blocks.h"
#include "transport/gloo/gloo_parcels.h"

namespace thinwire {

// The loop's thread's own once it is made.
class GlooTransfers {
 public:
  explicit GlooTransfers(GlooShared& shared);

  // Whoever has blocks under way has joined before, and leaves when they have ended. False once all
  // have failed.
  bool Join(BlockOwner* owner);
  void Leave(BlockOwner* owner);

  GlooParcels& parcels(int peer);
  // A block that has a buffer and a message of its own, which the owner has started or is about to.
  void Add(int peer, gloo::transport::UnboundBuffer* buffer, bool outgoing, BlockOwner* owner);

  // Looks what has ended between this rank and the peer. May be called with the connection's lock
  // held.
  void Collect(int peer);
  void FailAll();

 private:
  struct Message {
    gloo::transport::UnboundBuffer* buffer;
    bool outgoing;
    BlockOwner* owner;
  };

  void CollectMessages(int peer);

  GlooShared& shared_;
  std::vector<std::vector<Message>> messages_;         // by peer
  std::vector<std::unique_ptr<GlooParcels>> parcels_;  // by peer; null before the first one
  std::unordered_set<BlockOwner*> owners_;
  bool failed_ = false;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_TRANSFERS_H_
