#include "tests/transport/fake_nccl/fake_communicator.h"

#include <dlfcn.h>

#include <chrono>
#include <deque>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "tests/transport/fake_nccl/fake_registry.h"

namespace thinwire {
namespace {

// If the program has not set a queue, one of its libraries is the stand-in for a device.
FakeQueue QueueOf(FakeNccl& fake) {
  if (fake.queue == nullptr) {
    fake.queue = reinterpret_cast<FakeQueue>(dlsym(RTLD_DEFAULT, "tw_host_device_queue"));
  }
  return fake.queue;
}

struct Kernel {
  std::shared_ptr<FakeWorld> world;
  int rank, ctas;
  FakeGroup group;
};

constexpr int kDefaultCtas = 32;

// The CTAs of all devices.
class Ctas {
 public:
  // Returns false if the kernel's rank aborted before there was room.
  bool Take(const Kernel& kernel) {
    FakeNccl& fake = FakeControls();
    const absl::MutexLock lock(&mu_);
    int& taken = taken_[kernel.rank];
    const auto fits = [&] {
      const int most = fake.most_ctas;
      return most < 0 || taken + kernel.ctas <= most;
    };
    if (!fits()) {
      ++fake.waiting_for_ctas;
      // Some conditions change without this lock, so it polls.
      while (!fits() && !kernel.world->has_aborted(kernel.rank)) {
        changed_.WaitWithTimeout(&mu_, absl::Milliseconds(5));
      }
      --fake.waiting_for_ctas;
      if (!fits()) return false;
    }
    taken += kernel.ctas;
    ++fake.running;
    return true;
  }
  void Return(const Kernel& kernel) {
    const absl::MutexLock lock(&mu_);
    taken_[kernel.rank] -= kernel.ctas;
    --FakeControls().running;
    changed_.SignalAll();
  }

 private:
  absl::Mutex mu_;
  absl::CondVar changed_;
  std::map<int, int> taken_ ABSL_GUARDED_BY(mu_);  // by device
};

Ctas& TheCtas() {
  static auto& ctas = *new Ctas;
  return ctas;
}

// NCCL's thread that launches the groups of non-blocking communicators. NCCL has one per group.
class Launcher {
 public:
  Launcher() {
    std::thread([this] { Run(); }).detach();
  }

  void Take(FakeCommunicator* comm) {
    const absl::MutexLock lock(&mu_);
    queue_.push_back(comm);
  }

 private:
  void Run() {
    const auto has_work = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !queue_.empty(); };
    for (;;) {
      FakeCommunicator* comm = nullptr;
      {
        const absl::MutexLock lock(&mu_);
        mu_.Await(absl::Condition(&has_work));
        comm = queue_.front();
        queue_.pop_front();
      }
      comm->Launch();
      comm->in_progress = false;
    }
  }

  absl::Mutex mu_;
  std::deque<FakeCommunicator*> queue_ ABSL_GUARDED_BY(mu_);
};

void HandToLauncher(FakeCommunicator* comm) {
  static auto& launcher = *new Launcher;  // lives as long as the process
  launcher.Take(comm);
}

void RunKernel(void* argument) {
  const std::unique_ptr<Kernel> kernel(static_cast<Kernel*>(argument));
  FakeNccl& fake = FakeControls();
  const int hangs_from = fake.hangs_from, late = fake.late_us;
  if (!TheCtas().Take(*kernel)) return;
  kernel->world->Run(kernel->rank, kernel->group,
                     hangs_from >= 0 && kernel->group.number >= hangs_from);
  TheCtas().Return(*kernel);
  if (kernel->world->mixed() > 0) ++fake.misuses;
  std::minstd_rand random(kernel->group.number * 31 + kernel->rank);
  if (late > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % (late + 1)));
}

// Returns true if the group has a block of this kind, for the counts.
bool Holds(const FakeGroup& group, FakeKind kind) {
  for (const FakeGroup::Block& block : group.blocks) {
    if (block.kind == kind) return true;
  }
  return false;
}

// NCCL runs a group's collectives first, the largest before the others, and then its messages. If
// ranks group them differently, one may wait for another forever, unless all of them are messages.
bool IsOneOrder(const FakeGroup& group) {
  return group.after.empty() || (group.after.size() == 1 && !Holds(group, FakeKind::kMessage));
}

}  // namespace

FakeNccl& FakeControls() {
  static FakeNccl controls;
  return controls;
}

void FakeAwaitDevice() {
  while (FakeControls().device_hangs != 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

NcclHandle FakeCommunicator::Enter(std::shared_ptr<FakeWorld> world, int rank, int size,
                                   bool blocks, int ctas) {
  static absl::Mutex mu;
  static auto& kept = *new std::vector<std::unique_ptr<FakeCommunicator>>;
  auto comm = std::make_unique<FakeCommunicator>(std::move(world), rank, size, blocks,
                                                 ctas == kNcclDefault ? kDefaultCtas : ctas);
  FakeControls().newest_ctas = comm->ctas;
  comm->world->Join();
  ++FakeControls().made;
  const absl::MutexLock lock(&mu);
  return reinterpret_cast<NcclHandle>(kept.emplace_back(std::move(comm)).get());
}

void FakeCommunicator::LaunchLater() {
  FakeNccl& fake = FakeControls();
  in_progress = true;
  launch_at = fake.now_us + fake.launch_us;
  waits_for_clock = fake.launch_us > 0;
  if (!waits_for_clock) HandToLauncher(this);
}

void FakeCommunicator::AwaitLauncher() const {
  while (in_progress) std::this_thread::yield();
}

void FakeCommunicator::DropLaunch() {
  if (!waits_for_clock) return AwaitLauncher();
  open.reset();
  in_progress = false;
}

void FakeCommunicator::Launch() {
  FakeNccl& fake = FakeControls();
  if (!blocks && !IsOneOrder(*open)) ++fake.misuses;
  if (!blocks && stream != nullptr && stream != open->stream) ++fake.misuses;
  stream = open->stream;
  open->number = groups++;
  ++fake.groups;
  if (LookWhereBlocksLie()) ++fake.registered_groups;
  if (Holds(*open, FakeKind::kGather)) ++fake.gathers;
  if (Holds(*open, FakeKind::kReduce)) ++fake.reductions;
  auto kernel = std::make_unique<Kernel>(Kernel{world, rank, ctas, std::move(*open)});
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
  if (in_progress) {
    if (!waits_for_clock || ++fake.now_us < launch_at) return kNcclInProgress;
    waits_for_clock = false;
    HandToLauncher(this);
    AwaitLauncher();  // while the clock stands still
  }
  if (state == FakeState::kFinalizing) {
    if (fake.never_final != 0) return kNcclInProgress;
    state = FakeState::kFinal;
  }
  return kNcclOk;
}

}  // namespace thinwire
