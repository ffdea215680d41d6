#include "tests/transport/fake_nccl/fake_nccl.h"

#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "tests/transport/fake_nccl/fake_reduce.h"
#include "tests/transport/fake_nccl/fake_world.h"
#include "transport/nccl/nccl_abi.h"

namespace thinwire {
namespace {

FakeNccl& Controls() {
  static FakeNccl controls;
  return controls;
}

// A program that does not set the queue has the stand-in for a device among its libraries.
FakeQueue QueueOf(FakeNccl& fake) {
  if (fake.queue == nullptr) {
    fake.queue = reinterpret_cast<FakeQueue>(dlsym(RTLD_DEFAULT, "tw_host_device_queue"));
  }
  return fake.queue;
}

enum class State { kJoining, kReady, kFinalizing, kFinal, kEnded };

// One that blocks is held to less: it may be used outside of groups, on any stream, and destroyed
// at any time.
struct Communicator {
  Communicator(std::shared_ptr<FakeWorld> world, int rank, int size, bool blocks)
      : world(std::move(world)), rank(rank), size(size), blocks(blocks) {}

  const std::shared_ptr<FakeWorld> world;
  const int rank, size;
  const bool blocks;
  State state = State::kJoining;
  int polls_left = 0;
  int groups = 0;
  std::unique_ptr<FakeGroup> open;  // between start and end, or in progress
  NcclStream stream = nullptr;
  std::atomic<bool> entered{false};
};

// Never freed, so that a call that comes too late is found.
Communicator* Keep(std::unique_ptr<Communicator> comm) {
  static absl::Mutex mu;
  static auto& kept = *new std::vector<std::unique_ptr<Communicator>>;
  const absl::MutexLock lock(&mu);
  return kept.emplace_back(std::move(comm)).get();
}

// One call of a communicator; NCCL takes one at a time.
class Call {
 public:
  explicit Call(NcclHandle handle) : comm_(*reinterpret_cast<Communicator*>(handle)) {
    if (comm_.entered.exchange(true) || comm_.state == State::kEnded) ++Controls().misuses;
  }
  ~Call() { comm_.entered = false; }
  Communicator* operator->() { return &comm_; }
  Communicator& operator*() { return comm_; }

 private:
  Communicator& comm_;
};

std::shared_ptr<FakeWorld> WorldOf(const NcclUniqueId& id, int size) {
  static absl::Mutex mu;
  static auto& worlds = *new std::map<uint64_t, std::shared_ptr<FakeWorld>>;
  uint64_t key;
  std::memcpy(&key, id.bytes, sizeof(key));
  const absl::MutexLock lock(&mu);
  std::shared_ptr<FakeWorld>& world = worlds[key];
  if (world == nullptr) world = std::make_shared<FakeWorld>(size);
  return world;
}

Communicator* Enter(std::shared_ptr<FakeWorld> world, int rank, int size, bool blocks) {
  Communicator* const comm =
      Keep(std::make_unique<Communicator>(std::move(world), rank, size, blocks));
  comm->world->Join();
  ++Controls().made;
  return comm;
}

struct Kernel {
  std::shared_ptr<FakeWorld> world;
  int rank;
  FakeGroup group;
};

void RunKernel(void* argument) {
  const std::unique_ptr<Kernel> kernel(static_cast<Kernel*>(argument));
  FakeNccl& fake = Controls();
  const int hangs_from = fake.hangs_from, late = fake.late_us;
  kernel->world->Run(kernel->rank, kernel->group,
                     hangs_from >= 0 && kernel->group.number >= hangs_from);
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

void Launch(Communicator& comm) {
  FakeNccl& fake = Controls();
  if (!comm.blocks && comm.stream != nullptr && comm.stream != comm.open->stream) ++fake.misuses;
  comm.stream = comm.open->stream;
  comm.open->number = comm.groups++;
  ++fake.groups;
  if (Holds(*comm.open, FakeKind::kGather)) ++fake.gathers;
  if (Holds(*comm.open, FakeKind::kReduce)) ++fake.reductions;
  auto kernel = std::make_unique<Kernel>(Kernel{comm.world, comm.rank, std::move(*comm.open)});
  comm.open.reset();
  void* const stream = kernel->group.stream;
  QueueOf(fake)(stream, RunKernel, kernel.release());
}

// What a thread has between ncclGroupStart and ncclGroupEnd.
struct OpenGroups {
  int count = 0;
  std::vector<Communicator*> grouped;
};

// The calling thread's. Not thread_local: the thread sanitizer ends a program in which a library
// with such variables is loaded while threads come and go.
OpenGroups& Own() {
  static absl::Mutex mu;
  static std::map<std::thread::id, OpenGroups> of_threads;
  const absl::MutexLock lock(&mu);
  return of_threads[std::this_thread::get_id()];
}

NcclResult EndGroup() {
  OpenGroups& own = Own();
  if (--own.count > 0) return kNcclOk;
  FakeNccl& fake = Controls();
  NcclResult result = kNcclOk;
  for (Communicator* comm : std::exchange(own.grouped, {})) {
    comm->polls_left = comm->blocks ? 0 : fake.polls.load();
    if (fake.launch_error != 0) {
      comm->open.reset();
      result = static_cast<NcclResult>(fake.launch_error.load());
    } else if (comm->polls_left > 0) {
      result = kNcclInProgress;
    } else {
      Launch(*comm);
    }
  }
  return result;
}

// The group that a thread has open on a communicator; null if none may be.
FakeGroup* GroupOf(Communicator& comm, NcclStream stream) {
  if (comm.blocks && comm.state == State::kJoining) {
    comm.world->AwaitAll();
    comm.state = State::kReady;
  }
  if (comm.state != State::kReady || comm.polls_left > 0 || Own().count == 0) {
    ++Controls().misuses;
    return nullptr;
  }
  if (comm.open == nullptr) {
    comm.open = std::make_unique<FakeGroup>();
    Own().grouped.push_back(&comm);
  }
  comm.open->stream = stream;
  return comm.open.get();
}

// Calls add(group), in a group of its own if the caller has none, and may.
template <typename Adder>
NcclResult Add(NcclHandle handle, NcclStream stream, Adder add) {
  Call comm(handle);
  const bool alone = Own().count == 0 && comm->blocks;
  if (alone) ++Own().count;
  FakeGroup* const group = GroupOf(*comm, stream);
  if (group != nullptr) add(*comm, *group);
  const NcclResult ended = alone ? EndGroup() : kNcclOk;
  return group == nullptr ? kNcclInvalidUsage : ended;
}

// Where the communicator stands; going on by a step.
NcclResult Progress(Communicator& comm) {
  FakeNccl& fake = Controls();
  if (fake.failing_rank == comm.rank) return static_cast<NcclResult>(fake.async_error.load());
  if (comm.state == State::kJoining) {
    if (!comm.world->complete()) return kNcclInProgress;
    comm.state = State::kReady;
  }
  if (comm.polls_left > 0) {
    if (--comm.polls_left > 0) return kNcclInProgress;
    Launch(comm);
  }
  if (comm.state == State::kFinalizing) {
    if (fake.never_final != 0) return kNcclInProgress;
    comm.state = State::kFinal;
  }
  return kNcclOk;
}

NcclHandle HandleOf(Communicator* comm) { return reinterpret_cast<NcclHandle>(comm); }

// What NCCL keeps in an id; the rest are zeros.
constexpr size_t kIdBytes = 36;

}  // namespace
}  // namespace thinwire

#define THINWIRE_FAKE extern "C" __attribute__((visibility("default")))

using namespace thinwire;  // NOLINT: all that follows is another library's interface

THINWIRE_FAKE FakeNccl* tw_fake_nccl() { return &Controls(); }

THINWIRE_FAKE NcclResult ncclGetVersion(int* version) {
  *version = Controls().version;
  return kNcclOk;
}
THINWIRE_FAKE const char* ncclGetErrorString(NcclResult result) {
  return result == kNcclRemoteError ? "remote process exited or there was a network error"
                                    : "fake failure";
}
THINWIRE_FAKE const char* ncclGetLastError(NcclHandle) { return "the fake's last words"; }

THINWIRE_FAKE NcclResult ncclGetUniqueId(NcclUniqueId* id) {
  static std::atomic<uint64_t> next{1};
  const uint64_t key = Controls().same_id != 0 ? 1 : next++;
  std::memset(id->bytes, 0, sizeof(id->bytes));
  std::memset(id->bytes, '\xfe', Controls().long_id != 0 ? sizeof(id->bytes) : kIdBytes);
  std::memcpy(id->bytes, &key, sizeof(key));
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclCommInitRankConfig(NcclHandle* handle, int size, NcclUniqueId id,
                                                int rank, NcclConfig* config) {
  *handle = nullptr;
  if (config->size != sizeof(NcclConfig) || config->magic != NcclConfig().magic ||
      config->version > static_cast<unsigned>(Controls().version)) {
    return kNcclInvalidArgument;
  }
  if (Controls().refuses == rank) return kNcclCudaError;
  *handle = HandleOf(Enter(WorldOf(id, size), rank, size, config->blocking != 0));
  return config->blocking != 0 ? kNcclOk : kNcclInProgress;
}

THINWIRE_FAKE NcclResult ncclCommInitRank(NcclHandle* handle, int size, NcclUniqueId id, int rank) {
  Communicator* const comm = Enter(WorldOf(id, size), rank, size, true);
  if (Own().count == 0) comm->world->AwaitAll();
  *handle = HandleOf(comm);
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclCommInitAll(NcclHandle* handles, int size, const int*) {
  const auto world = std::make_shared<FakeWorld>(size);
  for (int rank = 0; rank < size; ++rank) handles[rank] = HandleOf(Enter(world, rank, size, true));
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclCommSplit(NcclHandle handle, int color, int key, NcclHandle* made,
                                       NcclConfig*) {
  Call comm(handle);
  const FakeWorld::Part part = comm->world->Split(comm->rank, color, key);
  *made = part.world == nullptr ? nullptr : HandleOf(Enter(part.world, part.rank, part.size, true));
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclCommCount(NcclHandle handle, int* size) {
  *size = reinterpret_cast<Communicator*>(handle)->size;
  return kNcclOk;
}
THINWIRE_FAKE NcclResult ncclCommUserRank(NcclHandle handle, int* rank) {
  *rank = reinterpret_cast<Communicator*>(handle)->rank;
  return kNcclOk;
}
// Rank r is taken to be on device r.
THINWIRE_FAKE NcclResult ncclCommCuDevice(NcclHandle handle, int* ordinal) {
  return ncclCommUserRank(handle, ordinal);
}

THINWIRE_FAKE NcclResult ncclCommGetAsyncError(NcclHandle handle, NcclResult* error) {
  Call comm(handle);
  *error = Progress(*comm);
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclCommFinalize(NcclHandle handle) {
  Call comm(handle);
  if (comm->state != State::kReady) ++Controls().misuses;
  comm->state = State::kFinalizing;
  return kNcclInProgress;
}

THINWIRE_FAKE NcclResult ncclCommDestroy(NcclHandle handle) {
  Call comm(handle);
  if (comm->state != State::kFinal && !comm->blocks) ++Controls().misuses;
  comm->state = State::kEnded;
  ++Controls().destroyed;
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclCommAbort(NcclHandle handle) {
  Call comm(handle);
  comm->state = State::kEnded;
  comm->world->Abort(comm->rank);
  ++Controls().aborted;
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclGroupStart() { return ++Own().count, kNcclOk; }
THINWIRE_FAKE NcclResult ncclGroupEnd() { return EndGroup(); }

THINWIRE_FAKE NcclResult ncclSend(const void* data, size_t count, NcclDataType type, int peer,
                                  NcclHandle comm, NcclStream stream) {
  if (type != kNcclBytes) return kNcclInvalidArgument;
  return Add(comm, stream, [&](Communicator&, FakeGroup& group) {
    group.blocks.push_back({peer, static_cast<const uint8_t*>(data), nullptr, count});
  });
}
THINWIRE_FAKE NcclResult ncclRecv(void* data, size_t count, NcclDataType type, int peer,
                                  NcclHandle comm, NcclStream stream) {
  if (type != kNcclBytes) return kNcclInvalidArgument;
  return Add(comm, stream, [&](Communicator&, FakeGroup& group) {
    group.blocks.push_back({peer, nullptr, static_cast<uint8_t*>(data), count});
  });
}

THINWIRE_FAKE NcclResult ncclAllGather(const void* send, void* recv, size_t count,
                                       NcclDataType type, NcclHandle handle, NcclStream stream) {
  if (type != kNcclBytes) return kNcclInvalidArgument;
  const auto* from = static_cast<const uint8_t*>(send);
  auto* const to = static_cast<uint8_t*>(recv);
  return Add(handle, stream, [=](Communicator& comm, FakeGroup& group) {
    for (int peer = 0; peer < comm.size; ++peer) {
      if (peer == comm.rank) continue;
      group.blocks.push_back({peer, from, to + peer * count, count, FakeKind::kGather});
    }
    group.after.emplace_back([own = to + comm.rank * count, from, count] {
      if (own != from) std::memcpy(own, from, count);
    });
  });
}

// Everybody sends all of it to everybody, who adds it up.
THINWIRE_FAKE NcclResult ncclAllReduce(const void* send, void* recv, size_t count, int type, int op,
                                       NcclHandle handle, NcclStream stream) {
  const size_t bytes = count * FakeSizeOf(type);
  if (FakeSizeOf(type) == 0 || op < kFakeSum || op > kFakeAvg) return kNcclInvalidArgument;
  const auto* from = static_cast<const uint8_t*>(send);
  return Add(handle, stream, [=](Communicator& comm, FakeGroup& group) {
    const auto inputs = std::make_shared<std::vector<uint8_t>>(comm.size * bytes);
    for (int peer = 0; peer < comm.size; ++peer) {
      if (peer == comm.rank) continue;
      group.blocks.push_back({peer, from, inputs->data() + peer * bytes, bytes, FakeKind::kReduce});
    }
    group.after.emplace_back([=, rank = comm.rank, size = comm.size] {
      std::memcpy(inputs->data() + rank * bytes, from, bytes);
      FakeReduce(inputs->data(), size, count, type, op, static_cast<uint8_t*>(recv));
    });
  });
}
