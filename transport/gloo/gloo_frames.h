// GlooFrames: frames of one size to and from one peer; and the bytes of those that hold parcels.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_FRAMES_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_FRAMES_H_

#include <gloo/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/types.h"

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
  // One of its blocks has come or left, or will not, for that reason: its peer is lost. The owner
  // may end in this call if it was the last one.
  virtual void OnBlockEnded(const absl::Status& status) = 0;
  // The group has failed: none of its blocks will come or leave any more. The owner may end in this
  // call.
  virtual void OnFailure() = 0;

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

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_FRAMES_H_
