// The controls of a library with NCCL's binary interface, for tests: its ranks are threads of one
// process, and its kernels are work of the streams of kernels/host_device.h.
#ifndef THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_NCCL_H_
#define THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_NCCL_H_

#include <atomic>

namespace thinwire {

// Queues work(argument) on a stream.
using FakeQueue = void (*)(void* stream, void (*work)(void* argument), void* argument);

struct FakeNccl {
  std::atomic<int> version{23007};
  std::atomic<FakeQueue> queue{nullptr};  // null: tw_host_device_queue of the process

  // How the library behaves. -1 is no rank, and never.
  std::atomic<int> polls{0};          // answers «in progress» to each group, before it goes on
  std::atomic<int> late_us{0};        // the longest delay of a group's end
  std::atomic<int> refuses{-1};       // the rank whose communicator is not made
  std::atomic<int> hangs_from{-1};    // the number of the first group that never ends, from 0
  std::atomic<int> never_final{0};    // 1: finalizing goes on for ever
  std::atomic<int> failing_rank{-1};  // whose communicator has an asynchronous error
  std::atomic<int> async_error{0};    // which
  std::atomic<int> launch_error{0};   // the answer to each group in place of issuing it; 0: none
  std::atomic<int> long_id{0};        // 1: unique ids take all of their bytes
  std::atomic<int> same_id{0};        // 1: all unique ids are one
  std::atomic<int> no_memory{0};      // 1: ncclMemAlloc finds none
  std::atomic<int> refuses_to_register{-1};  // the rank whose memory is not registered
  std::atomic<int> registers_nothing{0};     // 1: as NCCL_LOCAL_REGISTER=0 does

  // What has happened.
  std::atomic<int> misuses{0};  // calls that NCCL's documentation forbids
  std::atomic<int> made{0}, destroyed{0}, aborted{0};
  // Issued, of all ranks: groups, those with gathers, those with reductions.
  std::atomic<int> groups{0}, gathers{0}, reductions{0};
  // Of those groups, the ones that moved blocks of registered memory only.
  std::atomic<int> registered_groups{0};
  // Pieces of memory, and registrations: those that ended one by one, and with an aborted
  // communicator.
  std::atomic<int> allocated{0}, freed{0};
  std::atomic<int> registered{0}, deregistered{0}, ended_by_abort{0};
};

// The exported name of `FakeNccl* ()`.
inline constexpr char kFakeNcclSymbol[] = "tw_fake_nccl";

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_NCCL_H_
