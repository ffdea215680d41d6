// GlooLinks: one rank's Gloo connections to all others. Each is a GlooPeer, which sends small data
// in GlooFrames. GlooLinks is the rank's control plane, and the data plane uses it.
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

// The bytes of a frame of parcels: small blocks one after another, each behind a header. After the
// last one come zeros, which are not sent (GlooFrames).
struct Parcel {
  uint64_t slot = 0;  // not 0
  Bytes block;
};

// The bytes of a frame that a block of this size takes, with its header.
size_t ParcelBytes(size_t block);

// Writes a parcel to the front of `rest`, which has room for it; `rest` becomes what is behind it.
void WriteParcel(const Parcel& parcel, MutableBytes& rest);

// Reads the parcel at the front of a received `rest`, and removes it; nullopt if none is left. Its
// block lies within the frame. DataLoss, which names the defect, for bytes that WriteParcel can't
// have written.
absl::StatusOr<std::optional<Parcel>> ReadParcel(Bytes& rest);

// Learns when blocks that Gloo moves have arrived or left. Called on the loop's thread, with a
// connection's lock held: no call may send, receive or block.
class BlockOwner {
 public:
  // One of its blocks has arrived or left, or never will, for the reason in `status`: the group has
  // failed. The owner may be destroyed in this call if the block was its last one.
  virtual void OnBlockEnded(const absl::Status& status) = 0;

 protected:
  ~BlockOwner() = default;
};

// Two rings. Gloo sends a message only when its receive is known at the other end, so the receives
// of a whole ring are started ahead, and a frame takes one latency instead of two. Frames of one
// slot arrive in the order in which their receives were started, and leave in the order in which
// they were sent. Only the bytes that a frame holds are sent. Used on the loop's thread only.
class GlooFrames {
 public:
  // `slot` is Gloo's, the same at both ends.
  GlooFrames(gloo::Context& context, int peer, uint64_t slot, size_t bytes, size_t count);

  size_t bytes() const { return bytes_; }

  // Starts receives for all frames of the ring that are free. Throws if the connection is closed.
  void Refill();
  // True if so many receives have ended that Refill is due.
  bool low() const { return started_ - taken_ <= count_ / 2; }

  // Frames that were sent and have not left yet.
  size_t under_way() const { return owners_.size(); }
  bool has_room() const { return under_way() < count_; }
  // Returns the next frame to send. Fill in its first `bytes` bytes, at least 1; then call Send.
  // `owners` are called when it has left. Throws if the connection is closed.
  MutableBytes next();
  void Send(size_t bytes, std::vector<BlockOwner*> owners);

  // Passes on the frames that have arrived, whole, with zeros after the bytes that were sent; calls
  // the owners of those that have left, and returns true if one has.
  bool Collect(const std::function<void(Bytes)>& take);

  // Returns the owners, which are not called any more.
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
  std::deque<std::vector<BlockOwner*>> owners_;  // of frames under way, the oldest first
};

class GlooLinks;

// All traffic with one other rank over Gloo: control frames; parcels, which are small blocks that
// share frames; and messages, which are large blocks each by itself. No thread waits for a peer:
// Gloo's loop reports when bytes have arrived or left, and starts the next transfer.
//
// All functions except SendFrame and Drain must be called on the loop's thread. Destroy it only
// when the connection is closed and the loop has run what was posted.
class GlooPeer {
 public:
  static constexpr uint64_t kControlSlot = 2;                 // slots of frames are even
  static constexpr size_t kLargestParcel = size_t{16} << 10;  // bytes of a block
  static constexpr int kMostRanks = 64;                       // frames take some 0.2 MiB per peer

  // True if blocks of this size are parcels, at both ends. A message of Gloo takes two notices, one
  // of which its sender waits for; a parcel is sent at once, and those that are ready together
  // share a frame.
  static constexpr bool TakesParcel(size_t bytes, int world) {
    return bytes <= kLargestParcel && world <= kMostRanks;
  }

  GlooPeer(GlooLinks& links, int peer);

  // Never waits: a stopped peer, which receives nothing, must not stop the ranks that report it.
  // Frames are sent after a failure too, so that the peer learns the reason before the connections
  // close.
  void SendFrame(const ControlFrame& frame);
  // Waits, at most until the deadline, until the frames sent so far have left.
  void Drain(Deadline deadline);

  // Blocks, while the group has not failed. Both ends name a block by the same slot, which is odd
  // and which no other block between them has. The memory must live until the owner is called for
  // the block's end; that of a message which ends with an error, as long as its buffer. Those with
  // a buffer throw if the connection is closed.
  void ReceiveParcel(uint64_t slot, MutableBytes to, BlockOwner* owner);
  void SendParcel(uint64_t slot, Bytes from, BlockOwner* owner);
  void ReceiveMessage(uint64_t slot, gloo::transport::UnboundBuffer& buffer, BlockOwner* owner);
  void SendMessage(uint64_t slot, gloo::transport::UnboundBuffer& buffer, BlockOwner* owner);

  // Called by the connection with its lock held, so they neither send nor receive nor block.
  // OnProgress: bytes have arrived or left; on the loop's thread. OnClosed: the connection is
  // closed, for the reason `why`; called once, as the last call, on any thread.
  void OnProgress();
  void OnClosed(const std::string& why);

  // Calls the owners of messages that have ended. May be called with the connection's lock held.
  void CollectMessages();

  // Ends the blocks under way with `reason`; no more may follow. Frames still arrive and leave as
  // long as the connection is open.
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

  // Used on the loop's thread only.
  GlooFrames control_;
  std::vector<std::unique_ptr<GlooFrames>> sizes_;  // frames of parcels, ascending; empty at first
  std::deque<Queued> queue_;                        // parcels that have no frame yet
  std::unordered_map<uint64_t, Expected> expected_;
  // Parcels that arrived before they were expected: no more than the peer has in flight.
  std::unordered_map<uint64_t, std::vector<uint8_t>> early_;
  std::vector<Message> messages_;

  absl::Mutex mu_;
  SteadyCondVar left_;                                    // when HaveLeft becomes true
  bool closed_ ABSL_GUARDED_BY(mu_) = false;              // the connection
  std::deque<ControlFrame> frames_ ABSL_GUARDED_BY(mu_);  // to send
  size_t under_way_ ABSL_GUARDED_BY(mu_) = 0;             // frames that were sent and have not left
};

// One rank's connections, the thread that may use them, and the transfers under way.
class GlooLinks final : public ControlPlane {
 public:
  // `loop` is that of the context's device. last_words: how long the destructor, which closes the
  // connections, waits for frames that have not left.
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
  GlooPeer* peer(int rank) { return peers_[rank].get(); }  // null: no connection

  // On the loop's thread: why blocks can't arrive or leave any more, or OK.
  const absl::Status& lost() const { return lost_; }

  // A frame has arrived. Thread-safe.
  void PushFrame(int from, const Bytes& frame);

 private:
  void OnFailure();
  // On the loop's thread, after a failure:
  void EndBlocks();
  void EndFrames(int turns);  // after `turns` turns of the loop
  bool IsReady() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return frames_ended_ || !frames_.empty(); }

  const std::shared_ptr<gloo::Context> context_;
  const Membership members_;
  const std::shared_ptr<Failure> failure_ = Failure::Make();
  const std::chrono::milliseconds last_words_;
  std::vector<std::unique_ptr<GlooPeer>> peers_;  // by rank
  absl::Status lost_;                             // used on the loop's thread only

  absl::Mutex mu_;
  std::deque<ControlMessage> frames_ ABSL_GUARDED_BY(mu_);
  bool frames_ended_ ABSL_GUARDED_BY(mu_) = false;  // frames from before a failure have arrived

  const std::unique_ptr<GlooLoop> loop_;  // destroyed before all above, once posted tasks have run
  Failure::Listener listener_;            // destroyed first
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_LINKS_H_
