// GlooLinks: one rank's connections with all others by Gloo, each a GlooPeer, which sends small
// things in GlooFrames. It is the rank's control plane, and the data plane stands on it.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_LINKS_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_LINKS_H_

#include <gloo/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "compress/types.h"
#include "transport/gloo/gloo_pair.h"
#include "transport/membership.h"
#include "transport/planes.h"
#include "transport/steady_cond_var.h"
#include "transport/store.h"

namespace thinwire {

// The bytes of a frame of parcels: small blocks one after another, each behind a header. Behind the
// last one are zeros, which are not sent (GlooFrames).
struct Parcel {
  uint64_t slot = 0;  // not 0
  Bytes block;
};

// The bytes of a frame that a block of so many takes.
size_t ParcelBytes(size_t block);

// Puts a parcel in front of `rest`, which has room for it, and leaves what is behind it.
void WriteParcel(const Parcel& parcel, MutableBytes& rest);

// Takes the parcel in front of `rest`, of a frame that came; null: there is none any more. Its
// block lies within the frame. DataLoss, which says what is wrong, for bytes that nobody has
// written so.
absl::StatusOr<std::optional<Parcel>> ReadParcel(Bytes& rest);

// Hears that blocks which Gloo moves have come or left. Called on the loop's thread, and with a
// connection's lock held: no call may send, receive or block.
class BlockOwner {
 public:
  // One of its blocks has come or left, or will not, for that reason: the group has failed. The
  // owner may end in this call if it was the last one.
  virtual void OnBlockEnded(const absl::Status& status) = 0;

 protected:
  ~BlockOwner() = default;
};

// Two rings. Gloo sends a message only when its receive is known at the other end, so the receives
// of a whole ring are started ahead, and a frame takes one latency, not two. Frames of one slot
// arrive in the order in which their receives were started, and leave in the order in which they
// were sent. Of a frame only the bytes that it holds are sent. The loop's thread's own.
class GlooFrames {
 public:
  // `slot` is Gloo's, the same at both ends.
  GlooFrames(gloo::Context& context, int peer, uint64_t slot, size_t bytes, size_t count);

  size_t bytes() const { return bytes_; }

  // Starts receives for all frames of the ring that are free. Throws if the connection is closed.
  void Refill();
  // True if so many receives have ended that it is time for Refill.
  bool low() const { return started_ - taken_ <= count_ / 2; }

  // Frames that were sent and have not left.
  size_t under_way() const { return owners_.size(); }
  bool has_room() const { return under_way() < count_; }
  // The next frame to send, of which the first `bytes`, at least 1, are to be filled in; then Send.
  // `owners` hear when it has left. Throws if the connection is closed.
  MutableBytes next();
  void Send(size_t bytes, std::vector<BlockOwner*> owners);

  // Hands on the frames that came, whole, with zeros behind the bytes that were sent; and tells
  // owners of those that left; true if one has.
  bool Collect(const std::function<void(Bytes)>& take);

  // Tells no owner any more, and returns them.
  std::vector<BlockOwner*> ForgetOwners();

 private:
  MutableBytes Frame(std::vector<uint8_t>& ring, size_t number) {
    return MutableBytes(ring).subspan(number % count_ * bytes_, bytes_);
  }

  const int peer_;
  const uint64_t slot_;
  const size_t bytes_, count_;
  std::vector<uint8_t> in_, out_;
  const std::unique_ptr<gloo::transport::UnboundBuffer> receiver_, sender_;  // the rings
  size_t started_ = 0, taken_ = 0;                                           // receives
  size_t sent_ = 0;
  std::deque<std::vector<BlockOwner*>> owners_;  // of the frames on their way, the oldest first
};

class GlooLinks;

// All that goes to and comes from one other rank over Gloo: control frames; parcels, small blocks
// that share frames; and messages, large blocks each by itself. No thread waits for a peer: Gloo's
// loop says when bytes came or left, and starts what is next.
//
// All but SendFrame and Drain are for the loop's thread. It ends when the connection is closed and
// the loop is done with what was posted.
class GlooPeer {
 public:
  static constexpr uint64_t kControlSlot = 2;                 // even slots are those of frames
  static constexpr size_t kLargestParcel = size_t{16} << 10;  // bytes of a block
  static constexpr int kMostRanks = 64;                       // frames take some 0.2 MiB a peer

  // True if blocks of so many bytes are parcels, at both ends. A message of Gloo takes two notices,
  // one of which its sender waits for; a parcel goes at once, and those that are ready together
  // share a frame.
  static constexpr bool TakesParcel(size_t bytes, int world) {
    return bytes <= kLargestParcel && world <= kMostRanks;
  }

  GlooPeer(GlooLinks& links, int peer);

  // Never waits: a peer that takes nothing, because it is stopped, must not stop those who would
  // say so. Frames leave after a failure as well, so that the peer hears its reason before the
  // connections close.
  void SendFrame(const ControlFrame& frame);
  // Gives the frames that were sent until the deadline to leave.
  void Drain(Deadline deadline);

  // Blocks, while the group has not failed. Both ends name a block by the same slot, which is odd
  // and which no other block between them has. The memory lives until the owner has heard of the
  // block's end; that of a message which ends with a reason, as long as its buffer. Those with a
  // buffer throw if the connection is closed.
  void ReceiveParcel(uint64_t slot, MutableBytes to, BlockOwner* owner);
  void SendParcel(uint64_t slot, Bytes from, BlockOwner* owner);
  void ReceiveMessage(uint64_t slot, gloo::transport::UnboundBuffer& buffer, BlockOwner* owner);
  void SendMessage(uint64_t slot, gloo::transport::UnboundBuffer& buffer, BlockOwner* owner);

  // Its connection tells it, with the connection's lock held: it neither sends nor receives then,
  // nor blocks. Bytes came or left, on the loop's thread; or the connection is closed, for that
  // reason, which comes once, as the last, from any thread.
  void OnProgress();
  void OnClosed(const std::string& why);

  // Tells the owners of messages that have ended. May be called with the connection's lock held.
  void CollectMessages();

  // Ends the blocks that are under way, with that reason, and no more may follow. Frames come and
  // leave as long as the connection is open.
  void EndBlocks(const absl::Status& reason);

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
  struct Message {
    gloo::transport::UnboundBuffer* buffer;
    bool outgoing;
    BlockOwner* owner;
  };

  void Post();
  void Run();
  void HearThatItClosed(const std::string& why);

  bool TakeFrame(MutableBytes to);
  void SendFrames();
  bool CollectFrames();

  void MakeParcelFrames();
  void PackParcels();
  GlooFrames* FrameFor(size_t bytes);
  void CollectParcels();
  void Unpack(Bytes frame);
  void Deliver(uint64_t slot, Bytes block);

  bool HaveLeft() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return closed_ || (frames_.empty() && under_way_ == 0);
  }

  GlooLinks& links_;
  const int peer_;
  std::atomic<bool> posted_{false};  // Run will look at everything again

  // The loop's thread's own.
  GlooFrames control_;
  std::vector<std::unique_ptr<GlooFrames>> sizes_;  // of parcels' frames, ascending; empty at first
  std::deque<Queued> queue_;                        // parcels that have no frame yet
  std::unordered_map<uint64_t, Expected> expected_;
  // Parcels that came before they were expected: no more than the peer has in flight.
  std::unordered_map<uint64_t, std::vector<uint8_t>> early_;
  std::vector<Message> messages_;

  absl::Mutex mu_;
  SteadyCondVar left_;                                    // HaveLeft is true
  bool closed_ ABSL_GUARDED_BY(mu_) = false;              // the connection
  std::deque<ControlFrame> frames_ ABSL_GUARDED_BY(mu_);  // to be sent
  size_t under_way_ ABSL_GUARDED_BY(mu_) = 0;             // frames that were sent and have not left
};

// One rank's connections, the thread that may use them, and what is under way.
class GlooLinks final : public ControlPlane {
 public:
  // `loop` is that of the context's device. last_words: how long the end of the links, which closes
  // the connections, waits for frames that have not left.
  GlooLinks(std::shared_ptr<gloo::Context> context, std::unique_ptr<GlooLoop> loop,
            std::chrono::milliseconds last_words);
  ~GlooLinks() override;

  const Membership& members() const override { return members_; }
  const std::shared_ptr<Failure>& failure() const override { return failure_; }
  absl::Status Send(int to, const ControlFrame& frame) override;
  absl::StatusOr<ControlMessage> Receive() override;
  void Flush(Deadline deadline) override;

  gloo::Context& context() { return *context_; }
  GlooLoop& loop() { return *loop_; }
  GlooPeer* peer(int rank) { return peers_[rank].get(); }  // null: there is no connection

  // On the loop's thread: why blocks can't come or leave any more, or OK.
  const absl::Status& lost() const { return lost_; }

  // A frame has come. Thread-safe.
  void PushFrame(int from, const Bytes& frame);

 private:
  void OnFailure();
  // On the loop's thread, after a failure:
  void EndBlocks();
  void EndFrames(int turns);  // after so many turns of the loop
  bool IsReady() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return frames_ended_ || !frames_.empty(); }

  const std::shared_ptr<gloo::Context> context_;
  const Membership members_;
  const std::shared_ptr<Failure> failure_ = Failure::Make();
  const std::chrono::milliseconds last_words_;
  std::vector<std::unique_ptr<GlooPeer>> peers_;  // by rank
  absl::Status lost_;                             // the loop's thread's

  absl::Mutex mu_;
  std::deque<ControlMessage> frames_ ABSL_GUARDED_BY(mu_);
  bool frames_ended_ ABSL_GUARDED_BY(mu_) = false;  // those from before a failure are here

  const std::unique_ptr<GlooLoop> loop_;  // ends before all above: what was posted runs by then
  Failure::Listener listener_;            // ends first
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_LINKS_H_
