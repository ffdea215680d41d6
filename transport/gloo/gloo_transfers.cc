#include "transport/gloo/gloo_transfers.h"

#include <utility>

#include "transport/gloo/gloo_completions.h"
#include "transport/gloo/gloo_shared.h"

namespace thinwire {

GlooTransfers::GlooTransfers(GlooShared& shared)
    : shared_(shared), messages_(shared.members().size), parcels_(shared.members().size) {}

bool GlooTransfers::Join(BlockOwner* owner) {
  if (!failed_) owners_.insert(owner);
  return !failed_;
}

void GlooTransfers::Leave(BlockOwner* owner) { owners_.erase(owner); }

GlooParcels& GlooTransfers::parcels(int peer) {
  if (parcels_[peer] == nullptr) parcels_[peer] = std::make_unique<GlooParcels>(shared_, peer);
  return *parcels_[peer];
}

void GlooTransfers::Add(int peer, gloo::transport::UnboundBuffer* buffer, bool outgoing,
                        BlockOwner* owner) {
  messages_[peer].push_back({buffer, outgoing, owner});
}

void GlooTransfers::Collect(int peer) {
  if (parcels_[peer] != nullptr) parcels_[peer]->Collect();
  CollectMessages(peer);
}

void GlooTransfers::CollectMessages(int peer) {
  std::vector<BlockOwner*> ended;
  std::erase_if(messages_[peer], [&](const Message& message) {
    const size_t count =
        message.outgoing ? TakeSent(*message.buffer) : TakeReceived(*message.buffer);
    if (count > 0) ended.push_back(message.owner);
    return count > 0;
  });
  for (BlockOwner* const owner : ended) owner->OnBlockEnded();
}

void GlooTransfers::FailAll() {
  failed_ = true;
  for (std::vector<Message>& messages : messages_) messages.clear();
  for (const auto& parcels : parcels_) {
    if (parcels != nullptr) parcels->ForgetAll();
  }
  for (BlockOwner* const owner : std::exchange(owners_, {})) owner->OnFailure();
}

}  // namespace thinwire
