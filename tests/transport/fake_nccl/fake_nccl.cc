// Like NCCL, a group of sends and receives is matched with the peers' by the order in which each
// pair of ranks has issued them, as work of a stream that ends with the group; aborting ends it.
// Blocks whose sizes or kinds disagree never meet.
#include "tests/transport/fake_nccl/fake_nccl.h"

#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "transport/nccl/nccl_abi.h"

namespace thinwire {
namespace {

FakeNccl& Controls() {
  static FakeNccl controls;
  return controls;
}

// A block that a rank sends: its peer copies it.
struct Message {
  const uint8_t* data;
  size_t bytes;
  bool gather;
  bool taken = false;
};

// What one rank issues between two other calls, or by itself.
struct Group {
  struct Block {
    int peer;
    const uint8_t* out;  // or null
    uint8_t* in;
    size_t bytes;
  };
  std::vector<Block> blocks;
  bool gather = false;
  int number = 0;
  NcclStream stream = nullptr;
};

// The ranks of one unique id.
class World {
 public:
  explicit World(int size) : aborted_(size) {}

  void Join() {
    const absl::MutexLock lock(&mu_);
    ++joined_;
  }
  bool complete() const {
    const absl::MutexLock lock(&mu_);
    return joined_ == static_cast<int>(aborted_.size());
  }
  void Abort(int rank) {
    const absl::MutexLock lock(&mu_);
    aborted_[rank] = true;
  }

  // A kernel: returns when all blocks of the group are there and gone, or its rank has aborted.
  void Run(int rank, const Group& group, bool hangs) {
    std::deque<Message> sent;
    const absl::MutexLock lock(&mu_);
    for (const Group::Block& block : group.blocks) {
      if (block.out == nullptr) continue;
      sent.push_back({block.out, block.bytes, group.gather});
      if (!hangs) wires_[{rank, block.peer}].push_back(&sent.back());
    }
    for (const Group::Block& block : group.blocks) {
      if (block.in != nullptr) Receive(rank, block, group.gather, hangs);
    }
    for (const Message& message : sent) {
      const auto gone = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
        return aborted_[rank] || message.taken;
      };
      mu_.Await(absl::Condition(&gone));
    }
    const auto is_left = [](const Message* message) { return !message->taken; };
    for (auto& [ends, wire] : wires_) {
      if (ends.first == rank) std::erase_if(wire, is_left);
    }
  }

 private:
  void Receive(int rank, const Group::Block& block, bool gather, bool hangs)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::deque<Message*>& wire = wires_[{block.peer, rank}];
    const auto meets = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      return aborted_[rank] || (!hangs && !wire.empty() && wire.front()->bytes == block.bytes &&
                                wire.front()->gather == gather);
    };
    mu_.Await(absl::Condition(&meets));
    if (aborted_[rank]) return;
    std::memcpy(block.in, wire.front()->data, block.bytes);
    wire.front()->taken = true;
    wire.pop_front();
  }

  mutable absl::Mutex mu_;
  int joined_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<bool> aborted_ ABSL_GUARDED_BY(mu_);
  std::map<std::pair<int, int>, std::deque<Message*>> wires_ ABSL_GUARDED_BY(mu_);  // from, to
};

enum class State { kJoining, kReady, kFinalizing, kFinal, kEnded };

struct Communicator {
  Communicator(std::shared_ptr<World> world, int rank, int size)
      : world(std::move(world)), rank(rank), size(size) {}

  const std::shared_ptr<World> world;
  const int rank, size;
  State state = State::kJoining;
  int polls_left = 0;
  int groups = 0;
  std::unique_ptr<Group> open;  // between start and end, or in progress
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

std::shared_ptr<World> WorldOf(const NcclUniqueId& id, int size) {
  static absl::Mutex mu;
  static auto& worlds = *new std::map<uint64_t, std::shared_ptr<World>>;
  uint64_t key;
  std::memcpy(&key, id.bytes, sizeof(key));
  const absl::MutexLock lock(&mu);
  std::shared_ptr<World>& world = worlds[key];
  if (world == nullptr) world = std::make_shared<World>(size);
  return world;
}

struct Kernel {
  std::shared_ptr<World> world;
  int rank;
  Group group;
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

void Launch(Communicator& comm) {
  FakeNccl& fake = Controls();
  if (comm.stream != nullptr && comm.stream != comm.open->stream) ++fake.misuses;
  comm.stream = comm.open->stream;
  comm.open->number = comm.groups++;
  ++fake.groups;
  if (comm.open->gather) ++fake.gathers;
  auto kernel = std::make_unique<Kernel>(Kernel{comm.world, comm.rank, std::move(*comm.open)});
  comm.open.reset();
  void* const stream = kernel->group.stream;
  fake.queue.load()(stream, RunKernel, kernel.release());
}

thread_local int open_groups = 0;
thread_local std::vector<Communicator*> grouped;

NcclResult Add(NcclHandle handle, const Group::Block& block, bool gather, NcclStream stream) {
  Call comm(handle);
  if (comm->state != State::kReady || comm->polls_left > 0 || open_groups == 0) {
    ++Controls().misuses;
    return kNcclInvalidUsage;
  }
  if (comm->open == nullptr) {
    comm->open = std::make_unique<Group>();
    grouped.push_back(&*comm);
  }
  comm->open->blocks.push_back(block);
  comm->open->gather = gather;
  comm->open->stream = stream;
  return kNcclOk;
}

NcclResult AddGather(const uint8_t* send, uint8_t* recv, size_t bytes, NcclHandle handle,
                     NcclStream stream) {
  const auto& comm = *reinterpret_cast<Communicator*>(handle);
  for (int peer = 0; peer < comm.size; ++peer) {
    if (peer == comm.rank) continue;
    const NcclResult result = Add(handle, {peer, send, recv + peer * bytes, bytes}, true, stream);
    if (result != kNcclOk) return result;
  }
  if (recv + comm.rank * bytes != send) std::memcpy(recv + comm.rank * bytes, send, bytes);
  return kNcclOk;
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
  const uint64_t key = next++;
  std::memset(id->bytes, '\xfe', sizeof(id->bytes));
  std::memcpy(id->bytes, &key, sizeof(key));
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclCommInitRankConfig(NcclHandle* handle, int size, NcclUniqueId id,
                                                int rank, NcclConfig* config) {
  *handle = nullptr;
  if (config->size != sizeof(NcclConfig) || config->magic != NcclConfig().magic ||
      config->version > static_cast<unsigned>(Controls().version) || config->blocking != 0) {
    return kNcclInvalidArgument;
  }
  if (Controls().refuses == rank) return kNcclCudaError;
  Communicator* const comm = Keep(std::make_unique<Communicator>(WorldOf(id, size), rank, size));
  comm->world->Join();
  ++Controls().made;
  *handle = reinterpret_cast<NcclHandle>(comm);
  return kNcclInProgress;
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
  if (comm->state != State::kFinal) ++Controls().misuses;
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

THINWIRE_FAKE NcclResult ncclGroupStart() { return ++open_groups, kNcclOk; }

THINWIRE_FAKE NcclResult ncclGroupEnd() {
  if (--open_groups > 0) return kNcclOk;
  NcclResult result = kNcclOk;
  for (Communicator* comm : std::exchange(grouped, {})) {
    comm->polls_left = Controls().polls;
    if (comm->polls_left > 0) {
      result = kNcclInProgress;
    } else {
      Launch(*comm);
    }
  }
  return result;
}

THINWIRE_FAKE NcclResult ncclSend(const void* data, size_t count, NcclDataType type, int peer,
                                  NcclHandle comm, NcclStream stream) {
  if (type != kNcclBytes) return kNcclInvalidArgument;
  return Add(comm, {peer, static_cast<const uint8_t*>(data), nullptr, count}, false, stream);
}
THINWIRE_FAKE NcclResult ncclRecv(void* data, size_t count, NcclDataType type, int peer,
                                  NcclHandle comm, NcclStream stream) {
  if (type != kNcclBytes) return kNcclInvalidArgument;
  return Add(comm, {peer, nullptr, static_cast<uint8_t*>(data), count}, false, stream);
}
THINWIRE_FAKE NcclResult ncclAllGather(const void* send, void* recv, size_t count,
                                       NcclDataType type, NcclHandle comm, NcclStream stream) {
  if (type != kNcclBytes) return kNcclInvalidArgument;
  return AddGather(static_cast<const uint8_t*>(send), static_cast<uint8_t*>(recv), count, comm,
                   stream);
}
