// The controls of a library with NCCL's binary interface, for tests: its ranks are threads of one
// process, and its kernels are work on the streams of tests/host_device.
//
// It behaves like NCCL 2.30 in everything that decides whether a caller works and how fast. On a
// non-blocking communicator each ncclGroupEnd returns «in progress», and a thread of the library
// launches the kernel (src/group.cc). A kernel occupies as many CTAs of its device as its
// communicator's configuration allows, and waits until they are free. ncclCommAbort ends the
// communicator's own kernels, and then waits for the whole device. communicator's own kernels, and
// then waits for the whole device.
#ifndef THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_NCCL_H_
#define THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_NCCL_H_

#include <atomic>

namespace thinwire {

// Queues work(argument) on a stream.
using FakeQueue = void (*)(void* stream, void (*work)(void* argument), void* argument);

struct FakeNccl {
  std::atomic<int> version{23007};
  std::atomic<FakeQueue> queue{nullptr};  // null: tw_host_device_queue of the process

  // Settings. -1 means no rank, or never.
  std::atomic<int> launch_us{0};      // µs that a launch takes on the clock below
  std::atomic<int> late_us{0};        // the longest delay of a group's end, in µs
  std::atomic<int> refuses{-1};       // the rank whose communicator is not created
  std::atomic<int> hangs_from{-1};    // the first group that never ends, counted from 0
  std::atomic<int> never_final{0};    // 1: finalizing never ends
  std::atomic<int> failing_rank{-1};  // the rank whose communicator has an asynchronous error
  std::atomic<int> async_error{0};    // that error
  std::atomic<int> launch_error{0};   // returned for each group in place of issuing it; 0: none
  std::atomic<int> long_id{0};        // 1: unique ids use all of their bytes
  std::atomic<int> most_bytes{-1};    // ncclMemAlloc's limit in total; -1: any number
  std::atomic<int> most_ctas{-1};     // CTAs per device, rank r being on device r; -1: any number
  std::atomic<int> device_hangs{0};   // 1: waiting for the whole device never returns
  std::atomic<int> refuses_to_register{-1};  // the rank whose memory is not registered
  std::atomic<int> registers_nothing{0};     // 1: like NCCL_LOCAL_REGISTER=0

  // A clock that only its users advance: a query of a communicator's state takes 1 µs, and a thread
  // that sleeps adds the time of the sleep.
  std::atomic<int> now_us{0};

  // Counts of events.
  std::atomic<int> misuses{0};  // calls that NCCL's documentation forbids
  std::atomic<int> made{0}, destroyed{0}, aborted{0};
  // Groups that all ranks issued: all, those with gathers, those with reductions.
  std::atomic<int> groups{0}, gathers{0}, reductions{0};
  std::atomic<int> configured{0};                    // calls with their own configuration
  std::atomic<int> waiting_for_ctas{0}, running{0};  // kernels at this moment
  std::atomic<int> newest_ctas{0};                   // CTAs of the newest communicator
  // Those of `groups` that moved only blocks in registered memory.
  std::atomic<int> registered_groups{0};
  // Pieces of memory, and registrations: those ended one by one, and those ended by an abort of
  // their communicator.
  std::atomic<int> allocated{0}, freed{0};
  std::atomic<int> registered{0}, deregistered{0}, ended_by_abort{0};
};

// The exported function, of type `FakeNccl* ()`.
inline constexpr char kFakeNcclSymbol[] = "tw_fake_nccl";

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_NCCL_H_
