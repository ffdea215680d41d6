// Transport: bytes between ranks. One contract for every backend; tests/transport/contract_test.cc
// states it.
//
// Thread-safe: any number of exchanges run at once from any threads, told apart by tag. Failure is
// sticky: the first reason (a lost peer, an abort, a deadline) is what this and every later call
// returns. Status codes: Unavailable = a peer is gone, DeadlineExceeded = it did not answer in
// time, Cancelled or the given code after Abort. Nothing throws, and nothing aborts the process.
#ifndef THINWIRE_TRANSPORT_TRANSPORT_H_
#define THINWIRE_TRANSPORT_TRANSPORT_H_

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/types.h"
#include "transport/store.h"

namespace thinwire {

// A message on the control channel: fixed in size, because Gloo aborts on a size that differs.
inline constexpr size_t kControlBytes = 1024;
using ControlFrame = std::array<uint8_t, kControlBytes>;

struct ControlMessage {
  int from = 0;
  ControlFrame frame;
};

// An exchange in flight. Wait must be called, once, before the blocks of memory go; the destructor
// of an unwaited exchange aborts the transport, since the blocks would be written after they died.
class Pending {
 public:
  virtual ~Pending() = default;
  // Returns when all blocks were sent and received, or with the transport's failure. Passing the
  // deadline fails the whole transport.
  virtual absl::Status Wait(Deadline deadline) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Sends send[r] to each rank r and receives recv[r] from it; the blocks at the own rank are
  // ignored, empty blocks are neither sent nor awaited. Matching calls carry the same tag on all
  // ranks, never used twice, and both ends agree on each size: the tag is matched together with
  // the size, so a disagreement is a deadline, never an overrun. AllToAll gives every rank its own
  // block; AllGather passes one block n times.
  virtual std::unique_ptr<Pending> Start(uint64_t tag, std::span<const Bytes> send,
                                         std::span<const MutableBytes> recv) = 0;

  // The control channel. Send copies the frame and never waits, also for a peer that takes nothing;
  // frames between two ranks arrive in order. Receive blocks until a frame from any rank comes or
  // the transport fails; one thread at a time receives.
  virtual absl::Status SendControl(int to, const ControlFrame& frame) = 0;
  virtual absl::StatusOr<ControlMessage> ReceiveControl() = 0;

  // Fails every call in flight, and all later ones, with `reason`, on this rank. From any thread.
  // Control frames are delivered where the connection allows, also those sent after a failure.
  virtual void Abort(absl::Status reason) = 0;

  // After a failure: blocks until the control frames sent so far have left, or the deadline, so
  // that the process may end without taking its last words along.
  virtual void FlushControl(Deadline deadline) = 0;

  // The first failure, or OK.
  virtual absl::Status status() const = 0;

  // Bytes that exchanges (not control frames) have sent and received so far, payload only.
  virtual uint64_t bytes_sent() const = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_TRANSPORT_H_
