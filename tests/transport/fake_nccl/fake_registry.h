// The memory that the fake NCCL has given out, and what its communicators know of it.
#ifndef THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_REGISTRY_H_
#define THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_REGISTRY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace thinwire {

struct FakeCommunicator;

// What NCCL's documentation forbids is refused, and for the caller to count: each function returns
// false then.
class FakeRegistry {
 public:
  // Null if there would be more than most_bytes in all; -1: any number.
  void* Allocate(size_t bytes, int most_bytes);
  // Refuses other memory, and what a communicator still knows.
  bool Free(void* memory);

  // Refuses memory that was not allocated here, and what the communicator knows already. `key` is
  // never null.
  bool Register(const FakeCommunicator* comm, void* memory, size_t bytes, void** key);
  bool Deregister(const FakeCommunicator* comm, void* key);
  // The communicator ends; how much of it was still registered.
  int Forget(const FakeCommunicator* comm);

  // Whether all of the block lies in memory that the communicator knows.
  bool Knows(const FakeCommunicator* comm, const uint8_t* block, size_t bytes);

 private:
  struct Registration {
    const FakeCommunicator* comm;
    const uint8_t* begin;
    size_t bytes;
  };

  absl::Mutex mu_;
  std::map<void*, size_t> memory_ ABSL_GUARDED_BY(mu_);  // bytes
  std::map<void*, std::unique_ptr<Registration>> registrations_ ABSL_GUARDED_BY(mu_);
};

// That of this copy of the library.
FakeRegistry& TheFakeRegistry();

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_REGISTRY_H_
