// Communicators of the fake NCCL: how each is created and makes progress, and how its groups of
// calls become kernels.
#ifndef THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_COMMUNICATOR_H_
#define THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_COMMUNICATOR_H_

#include <atomic>
#include <memory>
#include <utility>

#include "tests/transport/fake_nccl/fake_nccl.h"
#include "tests/transport/fake_nccl/fake_world.h"
#include "transport/nccl/nccl_library.h"

namespace thinwire {

// The controls of this copy of the library.
FakeNccl& FakeControls();

// Returns once all work of the device is done.
void FakeAwaitDevice();

enum class FakeState { kJoining, kReady, kFinalizing, kFinal, kEnded };

// A blocking communicator has fewer rules: it may be used outside of groups, on any stream, and be
// destroyed at any time.
struct FakeCommunicator {
  FakeCommunicator(std::shared_ptr<FakeWorld> world, int rank, int size, bool blocks, int ctas)
      : world(std::move(world)), rank(rank), size(size), blocks(blocks), ctas(ctas) {}

  // Creates a communicator. It is never freed, so that late calls are noticed.
  static NcclHandle Enter(std::shared_ptr<FakeWorld> world, int rank, int size, bool blocks,
                          int ctas = kNcclDefault);

  // Advances the communicator by a step, and returns its state.
  NcclResult Progress();
  // Ends the open group of a non-blocking communicator, which is launched later.
  void LaunchLater();
  void AwaitLauncher() const;
  // After this nothing is launched.
  void DropLaunch();
  // Queues the kernel of the open group.
  void Launch();
  // Marks the blocks of the open group that lie in registered memory; returns true if all do.
  bool LookWhereBlocksLie();

  const std::shared_ptr<FakeWorld> world;
  const int rank, size;
  const bool blocks;
  const int ctas;  // CTAs that each of its kernels occupies
  FakeState state = FakeState::kJoining;
  std::atomic<bool> in_progress{false};  // between the group's end and its launch
  bool waits_for_clock = false;          // until it reaches launch_at
  int launch_at = 0;
  int groups = 0;
  std::unique_ptr<FakeGroup> open;  // between start and end, or in progress
  NcclStream stream = nullptr;
  std::atomic<bool> entered{false};
};

inline FakeCommunicator& FakeOf(NcclHandle handle) {
  return *reinterpret_cast<FakeCommunicator*>(handle);
}

// A call on a communicator; NCCL allows only one at a time.
class FakeCall {
 public:
  explicit FakeCall(NcclHandle handle) : comm_(FakeOf(handle)) {
    if (comm_.entered.exchange(true) || comm_.state == FakeState::kEnded) ++FakeControls().misuses;
  }
  ~FakeCall() { comm_.entered = false; }
  FakeCommunicator* operator->() { return &comm_; }
  FakeCommunicator& operator*() { return comm_; }

 private:
  FakeCommunicator& comm_;
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_COMMUNICATOR_H_
