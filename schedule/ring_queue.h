// RingQueue: first in, first out, in a ring that grows and never shrinks, so that a steady state
// allocates nothing. Not thread-safe.
#ifndef THINWIRE_SCHEDULE_RING_QUEUE_H_
#define THINWIRE_SCHEDULE_RING_QUEUE_H_

#include <cstddef>
#include <utility>
#include <vector>

namespace thinwire {

template <typename T>
class RingQueue {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  const T& front() const { return ring_[first_]; }

  void Push(T item) {
    if (size_ == ring_.size()) Grow();
    ring_[(first_ + size_++) % ring_.size()] = std::move(item);
  }

  T Pop() {
    T item = std::move(ring_[first_]);
    ring_[first_] = T();
    first_ = (first_ + 1) % ring_.size();
    --size_;
    return item;
  }

 private:
  void Grow() {
    std::vector<T> larger(ring_.empty() ? 16 : 2 * ring_.size());
    for (size_t i = 0; i < size_; ++i) larger[i] = std::move(ring_[(first_ + i) % ring_.size()]);
    ring_ = std::move(larger);
    first_ = 0;
  }

  std::vector<T> ring_;
  size_t first_ = 0;
  size_t size_ = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_RING_QUEUE_H_
