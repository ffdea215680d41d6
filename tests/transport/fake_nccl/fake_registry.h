// The memory that the fake NCCL has allocated, and the registrations of its communicators.
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

// Functions return false if NCCL's documentation forbids the call; callers count these.
class FakeRegistry {
 public:
  // Returns null if more than most_bytes would be allocated in total; -1: any number.
  void* Allocate(size_t bytes, int most_bytes);
  // Refuses unknown memory, and memory that is still registered.
  bool Free(void* memory);

  // Refuses memory that was not allocated here or is registered already. `key` is never null.
  bool Register(const FakeCommunicator* comm, void* memory, size_t bytes, void** key);
  bool Deregister(const FakeCommunicator* comm, void* key);
  // Ends a communicator; returns how many of its registrations were left.
  int Forget(const FakeCommunicator* comm);

  // Returns true if the communicator has registered all of the block's memory.
  bool Knows(const FakeCommunicator* comm, const uint8_t* block, size_t bytes);

 private:
  struct Registration {
    const FakeCommunicator* comm;
    const uint8_t* begin;
    size_t bytes;
  };

  absl::Mutex mu_;
  std::map<void*, size_t> memory_ ABSL_GUARDED_BY(mu_);  // by address: bytes
  std::map<void*, std::unique_ptr<Registration>> registrations_ ABSL_GUARDED_BY(mu_);
};

// The registry of this copy of the library.
FakeRegistry& TheFakeRegistry();

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_REGISTRY_H_
