// The controls of a library with NCCL's binary interface, for tests: its ranks are threads of one
// process, and its kernels are work of the streams of tests/host_device.
//
// It behaves as NCCL 2.30 does where that decides whether a caller works and how fast. On a
// communicator that does not block, each ncclGroupEnd returns «in progress», and a thread of the
// library launches the kernel (src/group.cc). A kernel occupies as many CTAs of its device as its
// communicator's configuration allows, and waits while they are not free. ncclCommAbort ends the
// communicator's own kernels, and then waits for the whole device.
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
  std::atomic<int> launch_us{0};      // what a launch takes on the clock below
  std::atomic<int> late_us{0};        // the longest delay of a group's end
  std::atomic<int> refuses{-1};       // the rank whose communicator is not made
  std::atomic<int> hangs_from{-1};    // the number of the first group that never ends, from 0
  std::atomic<int> never_final{0};    // 1: finalizing goes on for ever
  std::atomic<int> failing_rank{-1};  // whose communicator has an asynchronous error
  std::atomic<int> async_error{0};    // which
  std::atomic<int> launch_error{0};   // the answer to each group in place of issuing it; 0: none
  std::atomic<int> long_id{0};        // 1: unique ids take all of their bytes
  std::atomic<int> most_bytes{-1};    // of ncclMemAlloc, together; -1: any number
  std::atomic<int> most_ctas{-1};     // of a device, rank r being on device r; -1: any number
  std::atomic<int> device_hangs{0};   // 1: what waits for the whole device does not return
  std::atomic<int> refuses_to_register{-1};  // the rank whose memory is not registered
  std::atomic<int> registers_nothing{0};     // 1: as NCCL_LOCAL_REGISTER=0 does

  // A clock that stands still but for what its user spends: a question for a communicator's state
  // takes 1 µs, and whoever sleeps adds what that takes.
  std::atomic<int> now_us{0};

  // What has happened.
  std::atomic<int> misuses{0};  // calls that NCCL's documentation forbids
  std::atomic<int> made{0}, destroyed{0}, aborted{0};
  // Issued, of all ranks: groups, those with gathers, those with reductions.
  std::atomic<int> groups{0}, gathers{0}, reductions{0};
  std::atomic<int> configured{0};                    // calls with a configuration of their own
  std::atomic<int> waiting_for_ctas{0}, running{0};  // kernels, now
  std::atomic<int> newest_ctas{0};                   // of the communicator that was made last
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
