#include "tests/transport/fake_nccl/fake_nccl.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "tests/transport/fake_nccl/fake_communicator.h"
#include "tests/transport/fake_nccl/fake_reduce.h"
#include "tests/transport/fake_nccl/fake_registry.h"
#include "tests/transport/fake_nccl/fake_world.h"
#include "transport/nccl/nccl_library.h"

namespace thinwire {
namespace {

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

// A thread's state between ncclGroupStart and ncclGroupEnd.
struct OpenGroups {
  int count = 0;
  std::vector<FakeCommunicator*> grouped;
};

// The calling thread's state. Not thread_local: the thread sanitizer aborts a program that loads a
// library with such variables while threads start and end.
OpenGroups& Own() {
  static absl::Mutex mu;
  static std::map<std::thread::id, OpenGroups> of_threads;
  const absl::MutexLock lock(&mu);
  return of_threads[std::this_thread::get_id()];
}

NcclResult EndGroup() {
  OpenGroups& own = Own();
  if (--own.count > 0) return kNcclOk;
  FakeNccl& fake = FakeControls();
  NcclResult result = kNcclOk;
  for (FakeCommunicator* comm : std::exchange(own.grouped, {})) {
    if (fake.launch_error != 0) {
      comm->open.reset();
      result = static_cast<NcclResult>(fake.launch_error.load());
    } else if (comm->blocks) {
      comm->Launch();
    } else {
      comm->LaunchLater();
      result = kNcclInProgress;
    }
  }
  return result;
}

// Returns the group that a thread has open on a communicator; null if none is allowed.
FakeGroup* GroupOf(FakeCommunicator& comm, NcclStream stream) {
  if (comm.blocks && comm.state == FakeState::kJoining) {
    comm.world->AwaitAll();
    comm.state = FakeState::kReady;
  }
  if (comm.state != FakeState::kReady || comm.in_progress || Own().count == 0) {
    ++FakeControls().misuses;
    return nullptr;
  }
  if (comm.open == nullptr) {
    comm.open = std::make_unique<FakeGroup>();
    Own().grouped.push_back(&comm);
  }
  comm.open->stream = stream;
  return comm.open.get();
}

// Calls add(group). Opens a group for it if the caller has none and the communicator is blocking.
template <typename Adder>
NcclResult Add(NcclHandle handle, NcclStream stream, Adder add) {
  FakeCall comm(handle);
  const bool alone = Own().count == 0 && comm->blocks;
  if (alone) ++Own().count;
  FakeGroup* const group = GroupOf(*comm, stream);
  if (group != nullptr) add(*comm, *group);
  const NcclResult ended = alone ? EndGroup() : kNcclOk;
  return group == nullptr ? kNcclInvalidUsage : ended;
}

}  // namespace
}  // namespace thinwire

#define THINWIRE_FAKE extern "C" __attribute__((visibility("default")))

using namespace thinwire;  // NOLINT: all that follows is another library's interface

THINWIRE_FAKE FakeNccl* tw_fake_nccl() { return &FakeControls(); }

THINWIRE_FAKE NcclResult ncclGetVersion(int* version) {
  *version = FakeControls().version;
  return kNcclOk;
}
THINWIRE_FAKE const char* ncclGetErrorString(NcclResult result) {
  return result == kNcclRemoteError ? "remote process exited or there was a network error"
                                    : "fake failure";
}
THINWIRE_FAKE const char* ncclGetLastError(NcclHandle) { return "the fake's last words"; }

// An id holds a number and the address of a loopback socket.
THINWIRE_FAKE NcclResult ncclGetUniqueId(NcclUniqueId* id) {
  static std::atomic<uint64_t> next{1};
  const uint64_t key = next++;
  std::memset(id->bytes, 0, sizeof(id->bytes));
  if (FakeControls().long_id != 0) std::memset(id->bytes, '\xfe', sizeof(id->bytes));
  std::memcpy(id->bytes, &key, sizeof(key));
  sockaddr_in here = {};
  here.sin_family = AF_INET;
  here.sin_port = htons(1);  // never connected to
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::memcpy(id->bytes + sizeof(key), &here, sizeof(here));
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclCommInitRankConfig(NcclHandle* handle, int size, NcclUniqueId id,
                                                int rank, NcclConfig* config) {
  *handle = nullptr;
  if (config->size != sizeof(NcclConfig) || config->magic != NcclConfig().magic ||
      config->version > static_cast<unsigned>(FakeControls().version)) {
    return kNcclInvalidArgument;
  }
  if (FakeControls().refuses == rank) return kNcclCudaError;
  *handle = FakeCommunicator::Enter(WorldOf(id, size), rank, size, config->blocking != 0,
                                    config->max_ctas);
  return config->blocking != 0 ? kNcclOk : kNcclInProgress;
}

THINWIRE_FAKE NcclResult ncclCommInitRank(NcclHandle* handle, int size, NcclUniqueId id, int rank) {
  const auto world = WorldOf(id, size);
  *handle = FakeCommunicator::Enter(world, rank, size, true);
  if (Own().count == 0) world->AwaitAll();
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclCommInitAll(NcclHandle* handles, int size, const int*) {
  const auto world = std::make_shared<FakeWorld>(size);
  for (int rank = 0; rank < size; ++rank) {
    handles[rank] = FakeCommunicator::Enter(world, rank, size, true);
  }
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclCommSplit(NcclHandle handle, int color, int key, NcclHandle* made,
                                       NcclConfig*) {
  FakeCall comm(handle);
  const FakeWorld::Part part = comm->world->Split(comm->rank, color, key);
  *made = part.world == nullptr ? nullptr
                                : FakeCommunicator::Enter(part.world, part.rank, part.size, true);
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclCommCount(NcclHandle handle, int* size) {
  *size = FakeOf(handle).size;
  return kNcclOk;
}
THINWIRE_FAKE NcclResult ncclCommUserRank(NcclHandle handle, int* rank) {
  *rank = FakeOf(handle).rank;
  return kNcclOk;
}
// Rank r uses device r.
THINWIRE_FAKE NcclResult ncclCommCuDevice(NcclHandle handle, int* ordinal) {
  return ncclCommUserRank(handle, ordinal);
}

THINWIRE_FAKE NcclResult ncclCommGetAsyncError(NcclHandle handle, NcclResult* error) {
  FakeCall comm(handle);
  *error = comm->Progress();
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclCommFinalize(NcclHandle handle) {
  FakeCall comm(handle);
  if (comm->state != FakeState::kReady) ++FakeControls().misuses;
  comm->state = FakeState::kFinalizing;
  return kNcclInProgress;
}

THINWIRE_FAKE NcclResult ncclCommDestroy(NcclHandle handle) {
  FakeCall comm(handle);
  if (comm->state != FakeState::kFinal && !comm->blocks) ++FakeControls().misuses;
  if (TheFakeRegistry().Forget(&*comm) > 0) ++FakeControls().misuses;
  comm->state = FakeState::kEnded;
  ++FakeControls().destroyed;
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclCommAbort(NcclHandle handle) {
  FakeCall comm(handle);
  comm->state = FakeState::kEnded;
  comm->world->Abort(comm->rank);
  comm->DropLaunch();
  FakeControls().ended_by_abort += TheFakeRegistry().Forget(&*comm);
  FakeAwaitDevice();
  ++FakeControls().aborted;
  return kNcclOk;
}

THINWIRE_FAKE NcclResult ncclGroupStart() { return ++Own().count, kNcclOk; }
THINWIRE_FAKE NcclResult ncclGroupEnd() { return EndGroup(); }

THINWIRE_FAKE NcclResult ncclSend(const void* data, size_t count, NcclDataType type, int peer,
                                  NcclHandle comm, NcclStream stream) {
  if (type != kNcclBytes) return kNcclInvalidArgument;
  return Add(comm, stream, [&](FakeCommunicator&, FakeGroup& group) {
    group.blocks.push_back({peer, static_cast<const uint8_t*>(data), nullptr, count});
  });
}
THINWIRE_FAKE NcclResult ncclRecv(void* data, size_t count, NcclDataType type, int peer,
                                  NcclHandle comm, NcclStream stream) {
  if (type != kNcclBytes) return kNcclInvalidArgument;
  return Add(comm, stream, [&](FakeCommunicator&, FakeGroup& group) {
    group.blocks.push_back({peer, nullptr, static_cast<uint8_t*>(data), count});
  });
}

THINWIRE_FAKE NcclResult ncclAllGather(const void* send, void* recv, size_t count,
                                       NcclDataType type, NcclHandle handle, NcclStream stream) {
  if (type != kNcclBytes) return kNcclInvalidArgument;
  const auto* from = static_cast<const uint8_t*>(send);
  auto* const to = static_cast<uint8_t*>(recv);
  return Add(handle, stream, [=](FakeCommunicator& comm, FakeGroup& group) {
    for (int peer = 0; peer < comm.size; ++peer) {
      if (peer == comm.rank) continue;
      group.blocks.push_back({peer, from, to + peer * count, count, FakeKind::kGather});
    }
    group.after.emplace_back([own = to + comm.rank * count, from, count] {
      if (own != from) std::memcpy(own, from, count);
    });
  });
}

namespace {

// Every rank sends each peer the elements which that peer adds up: the peer's part of `send`, or
// all of it if `apart` is 0.
NcclResult Reduce(const void* send, void* recv, size_t count, int type, int op, size_t apart,
                  NcclHandle handle, NcclStream stream) {
  const size_t bytes = count * FakeSizeOf(type);
  if (FakeSizeOf(type) == 0 || op < kFakeSum || op > kFakeAvg) return kNcclInvalidArgument;
  const auto* from = static_cast<const uint8_t*>(send);
  return Add(handle, stream, [=](FakeCommunicator& comm, FakeGroup& group) {
    const auto inputs = std::make_shared<std::vector<uint8_t>>(comm.size * bytes);
    for (int peer = 0; peer < comm.size; ++peer) {
      if (peer == comm.rank) continue;
      group.blocks.push_back({peer, from + peer * apart * bytes, inputs->data() + peer * bytes,
                              bytes, FakeKind::kReduce});
    }
    group.after.emplace_back([=, rank = comm.rank, size = comm.size] {
      std::memcpy(inputs->data() + rank * bytes, from + rank * apart * bytes, bytes);
      FakeReduce(inputs->data(), size, count, type, op, static_cast<uint8_t*>(recv));
    });
  });
}

}  // namespace

THINWIRE_FAKE NcclResult ncclAllReduce(const void* send, void* recv, size_t count, int type, int op,
                                       NcclHandle handle, NcclStream stream) {
  return Reduce(send, recv, count, type, op, 0, handle, stream);
}
THINWIRE_FAKE NcclResult ncclReduceScatter(const void* send, void* recv, size_t count, int type,
                                           int op, NcclHandle handle, NcclStream stream) {
  return Reduce(send, recv, count, type, op, 1, handle, stream);
}

// Since 2.31: a call's configuration, whose first field is its size.
THINWIRE_FAKE NcclResult ncclAllReduceConfig(const void* send, void* recv, size_t count, int type,
                                             int op, NcclHandle handle, NcclStream stream,
                                             const size_t* config) {
  if (config != nullptr && *config == 0) return kNcclInvalidArgument;
  ++FakeControls().configured;
  return ncclAllReduce(send, recv, count, type, op, handle, stream);
}
THINWIRE_FAKE NcclResult ncclReduceScatterConfig(const void* send, void* recv, size_t count,
                                                 int type, int op, NcclHandle handle,
                                                 NcclStream stream, const size_t* config) {
  if (config != nullptr && *config == 0) return kNcclInvalidArgument;
  ++FakeControls().configured;
  return ncclReduceScatter(send, recv, count, type, op, handle, stream);
}
