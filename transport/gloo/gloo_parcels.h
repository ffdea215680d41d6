// GlooParcels: small blocks to and from one peer, many to a message.
//
// A message of Gloo takes two notices, one of which its sender waits for. Parcels travel in frames
// whose receives were started ahead, as control frames do: a small block goes at once, and those
// that are ready together share a frame.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_PARCELS_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_PARCELS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "transport/gloo/gloo_blocks.h"
#include "transport/gloo/gloo_frames.h"
#include "transport/gloo/gloo_loop.h"
#include "transport/gloo/gloo_shared.h"
#include "transport/store.h"

namespace thinwire {

// The loop's thread's own once it is made. It ends when the loop is done with it.
class GlooParcels final : private GlooLoop::Task {
 public:
  static constexpr size_t kLargest = size_t{16} << 10;  // bytes of a block
  static constexpr int kMostRanks = 64;                 // frames take some 0.2 MiB a peer

  // Whether blocks of so many bytes are parcels, at both ends.
  static constexpr bool Takes(size_t bytes, int world) {
    return bytes <= kLargest && world <= kMostRanks;
  }

  GlooParcels(GlooShared& shared, int peer);

  // Both ends name a block by the same slot, which no other block between them has, and which is
  // not 0. The memory lives until the owner has heard of the block's end, or ForgetAll.
  void Expect(uint64_t slot, MutableBytes to, BlockOwner* owner);
  void Send(uint64_t slot, Bytes from, BlockOwner* owner);

  // What has come and left. May be called with the connection's lock held.
  void Collect();

  // After a failure: touches no block and no owner any more.
  void ForgetAll();

 private:
  struct Expected {
    MutableBytes to;
    BlockOwner* owner;
  };
  struct Queued {
    uint64_t slot;
    Bytes from;
    BlockOwner* owner;
  };

  void Post();
  void Run() override;
  void Pack();
  GlooFrames* FrameFor(size_t bytes);
  void Unpack(Bytes frame);
  void Deliver(uint64_t slot, Bytes block);

  GlooShared& shared_;
  const int peer_;
  std::vector<std::unique_ptr<GlooFrames>> sizes_;  // of frames, ascending
  bool posted_ = false;
  std::deque<Queued> queue_;
  std::unordered_map<uint64_t, Expected> expected_;
  // What came before it was expected: no more than the peer has in flight.
  std::unordered_map<uint64_t, std::vector<uint8_t>> early_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_PARCELS_H_
