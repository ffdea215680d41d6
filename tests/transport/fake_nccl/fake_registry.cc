#include "tests/transport/fake_nccl/fake_registry.h"

#include <cstdlib>

namespace thinwire {

// Never destroyed: memory of an abort that did not return is left allocated, and stays known here.
FakeRegistry& TheFakeRegistry() {
  static FakeRegistry& registry = *new FakeRegistry;
  return registry;
}

void* FakeRegistry::Allocate(size_t bytes, int most_bytes) {
  constexpr size_t kAlignment = 256;
  const absl::MutexLock lock(&mu_);
  size_t all = bytes;
  for (const auto& [allocated, size] : memory_) all += size;
  if (most_bytes >= 0 && all > static_cast<size_t>(most_bytes)) return nullptr;
  void* const memory =
      std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (memory != nullptr) memory_.emplace(memory, bytes);
  return memory;
}

bool FakeRegistry::Free(void* memory) {
  const absl::MutexLock lock(&mu_);
  for (const auto& [key, registration] : registrations_) {
    if (registration->begin == memory) return false;
  }
  if (memory_.erase(memory) == 0) return false;
  std::free(memory);
  return true;
}

bool FakeRegistry::Register(const FakeCommunicator* comm, void* memory, size_t bytes, void** key) {
  const absl::MutexLock lock(&mu_);
  const auto allocated = memory_.find(memory);
  if (allocated == memory_.end() || allocated->second < bytes) return false;
  for (const auto& [other, registration] : registrations_) {
    if (registration->comm == comm && registration->begin == memory) return false;
  }
  auto registration = std::make_unique<Registration>(
      Registration{comm, static_cast<const uint8_t*>(memory), bytes});
  *key = registration.get();
  registrations_.emplace(*key, std::move(registration));
  return true;
}

bool FakeRegistry::Deregister(const FakeCommunicator* comm, void* key) {
  const absl::MutexLock lock(&mu_);
  const auto found = registrations_.find(key);
  if (found == registrations_.end() || found->second->comm != comm) return false;
  registrations_.erase(found);
  return true;
}

int FakeRegistry::Forget(const FakeCommunicator* comm) {
  const absl::MutexLock lock(&mu_);
  return static_cast<int>(std::erase_if(
      registrations_, [comm](const auto& entry) { return entry.second->comm == comm; }));
}

bool FakeRegistry::Knows(const FakeCommunicator* comm, const uint8_t* block, size_t bytes) {
  const absl::MutexLock lock(&mu_);
  for (const auto& [key, known] : registrations_) {
    if (known->comm != comm || block < known->begin) continue;
    if (block + bytes <= known->begin + known->bytes) return true;
  }
  return false;
}

}  // namespace thinwire
