// BlockOwner: who hears that blocks which Gloo moves have come or left.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_BLOCKS_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_BLOCKS_H_

namespace thinwire {

// Called on the loop's thread, and with a connection's lock held: no call may send, receive or
// block.
class BlockOwner {
 public:
  // One of its blocks has come or left. The owner may end in this call if it was the last one.
  virtual void OnBlockEnded() = 0;
  // None of its blocks will come or leave any more. The owner may end in this call.
  virtual void OnFailure() = 0;

 protected:
  ~BlockOwner() = default;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_BLOCKS_H_
