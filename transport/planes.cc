#include "transport/planes.h"

#include <isa-l/crc.h>

#include <algorithm>
#include <cstring>

namespace thinwire {
namespace {

// Bytes are copied and checksummed piece by piece: a piece is still in the first-level cache after
// its copy, and well below the library's limit of an int.
constexpr size_t kPiece = 16 << 10;

// The library leaves the two inversions of the standard to its caller. It only reads, although its
// pointer is to mutable bytes.
uint32_t Extend(uint32_t crc, const uint8_t* bytes, size_t count) {
  return ~crc32_iscsi(const_cast<uint8_t*>(bytes), static_cast<int>(count), ~crc);
}

}  // namespace

std::shared_ptr<Failure> Failure::Make() { return std::shared_ptr<Failure>(new Failure()); }

// A thread that sees the failure may be the last owner of this object, and drop it at once.
void Failure::Fail(absl::Status reason) {
  const std::shared_ptr<Failure> alive = shared_from_this();
  {
    const absl::MutexLock lock(&mu_);
    if (!reason_.ok()) return;
    reason_ = std::move(reason);
    failed_.store(true, std::memory_order_release);
  }
  TellAll();
}

// Listeners may be removed meanwhile, by themselves or in another listener's call.
void Failure::TellAll() {
  const std::thread::id self = std::this_thread::get_id();
  uint64_t last = 0;
  for (;;) {
    std::shared_ptr<const std::function<void()>> tell;
    std::multimap<uint64_t, std::thread::id>::iterator call;
    {
      const absl::MutexLock lock(&mu_);
      const auto next = listeners_.upper_bound(last);
      if (next == listeners_.end()) return;
      last = next->first;
      tell = next->second;
      call = calls_.emplace(last, self);
    }
    (*tell)();
    const absl::MutexLock lock(&mu_);
    calls_.erase(call);
    told_.SignalAll();
  }
}

Failure::Listener Failure::Listen(std::function<void()> tell) {
  bool now;
  uint64_t id;
  {
    const absl::MutexLock lock(&mu_);
    id = next_id_++;
    listeners_.emplace(id, std::make_shared<const std::function<void()>>(tell));
    now = !reason_.ok();
  }
  Listener listener(shared_from_this(), id);
  if (now) tell();
  return listener;
}

void Failure::Remove(uint64_t id) {
  const absl::MutexLock lock(&mu_);
  listeners_.erase(id);
  const auto elsewhere = [&] {
    mu_.AssertHeld();
    const auto [begin, end] = calls_.equal_range(id);
    for (auto call = begin; call != end; ++call) {
      if (call->second != std::this_thread::get_id()) return true;
    }
    return false;
  };
  while (elsewhere()) told_.Wait(&mu_);
}

absl::Status Failure::reason() const {
  const absl::MutexLock lock(&mu_);
  return reason_;
}

uint32_t Crc32c(uint32_t crc, Bytes bytes) {
  for (size_t at = 0; at < bytes.size(); at += kPiece) {
    crc = Extend(crc, bytes.data() + at, std::min(kPiece, bytes.size() - at));
  }
  return crc;
}

uint32_t CopyWithCrc32c(uint32_t crc, Bytes bytes, uint8_t* to) {
  for (size_t at = 0; at < bytes.size(); at += kPiece) {
    const size_t count = std::min(kPiece, bytes.size() - at);
    std::memcpy(to + at, bytes.data() + at, count);
    crc = Extend(crc, to + at, count);
  }
  return crc;
}

}  // namespace thinwire
