// Communicators of the fake NCCL: how each is made and goes on, and how its groups of calls become
// kernels.
#ifndef THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_COMMUNICATOR_H_
#define THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_COMMUNICATOR_H_

#include <atomic>
#include <memory>
#include <utility>

#include "tests/transport/fake_nccl/fake_nccl.h"
#include "tests/transport/fake_nccl/fake_world.h"
#include "transport/nccl/nccl_library.h"

namespace thinwire {

// Those of this copy of the library.
FakeNccl& FakeControls();

// Returns once the whole device has nothing to do.
void FakeAwaitDevice();

enum class FakeState { kJoining, kReady, kFinalizing, kFinal, kEnded };

// One that blocks is held to less: it may be used outside of groups, on any stream, and destroyed
// at any time.
struct FakeCommunicator {
  FakeCommunicator(std::shared_ptr<FakeWorld> world, int rank, int size, bool blocks, int ctas)
      : world(std::move(world)), rank(rank), size(size), blocks(blocks), ctas(ctas) {}

  // Makes one. It is never freed, so that a call that comes too late is found.
  static NcclHandle Enter(std::shared_ptr<FakeWorld> world, int rank, int size, bool blocks,
                          int ctas = kNcclDefault);

  // Goes on by a step, and says where it stands.
  NcclResult Progress();
  // Ends the open group of a communicator that does not block: it is launched later.
  void LaunchLater();
  void AwaitLauncher() const;
  // Nothing will be launched from here on.
  void DropLaunch();
  // Queues the kernel of the open group.
  void Launch();
  // Marks the blocks of the open group that lie in registered memory; true if all do.
  bool LookWhereBlocksLie();

  const std::shared_ptr<FakeWorld> world;
  const int rank, size;
  const bool blocks;
  const int ctas;  // that each of its kernels occupies
  FakeState state = FakeState::kJoining;
  std::atomic<bool> in_progress{false};  // between the group's end and its launch
  bool waits_for_clock = false;          // to come to launch_at
  int launch_at = 0;
  int groups = 0;
  std::unique_ptr<FakeGroup> open;  // between start and end, or in progress
  NcclStream stream = nullptr;
  std::atomic<bool> entered{false};
};

inline FakeCommunicator& FakeOf(NcclHandle handle) {
  return *reinterpret_cast<FakeCommunicator*>(handle);
}

// One call of a communicator; NCCL takes one at a time.
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
