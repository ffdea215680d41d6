#include "tests/transport/fake_nccl/fake_communicator.h"

#include <dlfcn.h>

#include <chrono>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "tests/transport/fake_nccl/fake_registry.h"

namespace thinwire {
namespace {

// A program that does not set the queue has the stand-in for a device among its libraries.
FakeQueue QueueOf(FakeNccl& fake) {
  if (fake.queue == nullptr) {
    fake.queue = reinterpret_cast<FakeQueue>(dlsym(RTLD_DEFAULT, "tw_host_device_queue"));
  }
  return fake.queue;
}

struct Kernel {
  std::shared_ptr<FakeWorld> world;
  int rank;
  FakeGroup group;
};

void RunKernel(void* argument) {
  const std::unique_ptr<Kernel> kernel(static_cast<Kernel*>(argument));
  FakeNccl& fake = FakeControls();
  const int hangs_from = fake.hangs_from, late = fake.late_us;
  kernel->world->Run(kernel->rank, kernel->group,
                     hangs_from >= 0 && kernel->group.number >= hangs_from);
  if (kernel->world->mixed() > 0) ++fake.misuses;
  std::minstd_rand random(kernel->group.number * 31 + kernel->rank);
  if (late > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % (late + 1)));
}

// What a group holds, for the counts.
bool Holds(const FakeGroup& group, FakeKind kind) {
  for (const FakeGroup::Block& block : group.blocks) {
    if (block.kind == kind) return true;
  }
  return false;
}

}  // namespace

FakeNccl& FakeControls() {
  static FakeNccl controls;
  return controls;
}

NcclHandle FakeCommunicator::Enter(std::shared_ptr<FakeWorld> world, int rank, int size,
                                   bool blocks) {
  static absl::Mutex mu;
  static auto& kept = *new std::vector<std::unique_ptr<FakeCommunicator>>;
  auto comm = std::make_unique<FakeCommunicator>(std::move(world), rank, size, blocks);
  comm->world->Join();
  ++FakeControls().made;
  const absl::MutexLock lock(&mu);
  return reinterpret_cast<NcclHandle>(kept.emplace_back(std::move(comm)).get());
}

void FakeCommunicator::Launch() {
  FakeNccl& fake = FakeControls();
  if (!blocks && stream != nullptr && stream != open->stream) ++fake.misuses;
  stream = open->stream;
  open->number = groups++;
  ++fake.groups;
  if (LookWhereBlocksLie()) ++fake.registered_groups;
  if (Holds(*open, FakeKind::kGather)) ++fake.gathers;
  if (Holds(*open, FakeKind::kReduce)) ++fake.reductions;
  auto kernel = std::make_unique<Kernel>(Kernel{world, rank, std::move(*open)});
  open.reset();
  QueueOf(fake)(stream, RunKernel, kernel.release());
}

bool FakeCommunicator::LookWhereBlocksLie() {
  bool all = !open->blocks.empty();
  for (FakeGroup::Block& block : open->blocks) {
    const uint8_t* const at = block.in == nullptr ? block.out : block.in;
    block.registered = TheFakeRegistry().Knows(this, at, block.bytes);
    if (block.in != nullptr && block.out != nullptr &&
        TheFakeRegistry().Knows(this, block.out, block.bytes) != block.registered) {
      ++FakeControls().misuses;
    }
    all &= block.registered;
  }
  return all;
}

NcclResult FakeCommunicator::Progress() {
  FakeNccl& fake = FakeControls();
  if (fake.failing_rank == rank) return static_cast<NcclResult>(fake.async_error.load());
  if (state == FakeState::kJoining) {
    if (!world->complete()) return kNcclInProgress;
    state = FakeState::kReady;
  }
  if (polls_left > 0) {
    if (--polls_left > 0) return kNcclInProgress;
    Launch();
  }
  if (state == FakeState::kFinalizing) {
    if (fake.never_final != 0) return kNcclInProgress;
    state = FakeState::kFinal;
  }
  return kNcclOk;
}

}  // namespace thinwire
