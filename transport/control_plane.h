// ControlPlane: small frames between the ranks of a group, and the news of lost peers. One contract
// holds for every backend; tests/transport/control_plane_test.cc states it.
//
// A plane is thread-safe. Its failure is sticky: the first reason is what Send, Receive and status
// return from then on. The reason is Unavailable and names the rank when a peer is gone, and is the
// caller's own status after Abort. Where a lost peer fails only its part (failure.h), Send to that
// peer returns its reason, and all else goes on. No call throws, and none ends the process.
#ifndef THINWIRE_TRANSPORT_CONTROL_PLANE_H_
#define THINWIRE_TRANSPORT_CONTROL_PLANE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/failure.h"
#include "transport/membership.h"
#include "transport/store.h"

namespace thinwire {

// Frames have one fixed size, because Gloo ends the process on a size that differs.
inline constexpr size_t kControlBytes = 1024;
using ControlFrame = std::array<uint8_t, kControlBytes>;

struct ControlMessage {
  int from = 0;
  ControlFrame frame;
};

class ControlPlane {
 public:
  // Leaves the group: the planes of the peers fail with Unavailable, which names this rank. Frames
  // sent before get a moment to leave.
  virtual ~ControlPlane() = default;

  virtual const Membership& members() const = 0;
  int rank() const { return members().rank; }
  int size() const { return members().size; }

  // Copies the frame and never waits, not even for a peer that takes nothing. Frames between two
  // ranks arrive in the order in which they were sent. A frame that is sent after a failure is
  // delivered where the connection allows, so that peers hear the reason; the failure is returned
  // all the same.
  virtual absl::Status Send(int to, const ControlFrame& frame) = 0;

  // The same to every peer. Who wants to know of a failure asks for the status.
  void SendToAll(const ControlFrame& frame) {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) Send(peer, frame).IgnoreError();
    }
  }

  // Blocks until a frame from any rank is there, or until the plane has failed and all frames that
  // came before were taken. One thread at a time receives.
  virtual absl::StatusOr<ControlMessage> Receive() = 0;

  // After a failure: blocks until the frames sent so far have left, or until the deadline, so that
  // the process may end without taking its last words along. One thread at a time flushes. Without
  // a failure it returns at once.
  virtual void Flush(Deadline deadline) = 0;

  // The plane's on this rank, which planes may share.
  virtual const std::shared_ptr<Failure>& failure() const = 0;
  // Fails the plane on this rank with `reason`, unless it has failed before. From any thread.
  void Abort(absl::Status reason) { failure()->Fail(std::move(reason)); }
  // The first failure, or OK.
  absl::Status status() const { return failure()->reason(); }
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_CONTROL_PLANE_H_
