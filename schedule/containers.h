// Containers that reuse their memory, so that a steady state allocates nothing: RingQueue, a queue,
// and RecycledMap, a map by hashes. Not thread-safe.
#ifndef THINWIRE_SCHEDULE_CONTAINERS_H_
#define THINWIRE_SCHEDULE_CONTAINERS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "schedule/hash.h"

namespace thinwire {

// RingQueue: first in, first out, in a ring that grows and never shrinks.
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

// RecycledMap: a map by 64-bit keys. An erased value keeps its content, so that its memory is used
// again; whoever inserts at a key must set the value. Values never move in memory.
//
// A table of open addressing (Knuth, The Art of Computer Programming, vol. 3, section 6.4,
// algorithms L and R) holds keys and pointers, 16 bytes a slot, apart from the values: finding a
// key reads one cache line, where std::unordered_map reads three.
template <typename Value>
class RecycledMap {
 public:
  RecycledMap() = default;
  // A move keeps the values where they are; slots point to them, so there is no copy.
  RecycledMap(RecycledMap&&) = default;
  RecycledMap& operator=(RecycledMap&&) = default;

  // The value at `key`; null if there is none.
  Value* Find(uint64_t key) { return size_ == 0 ? nullptr : slots_[SlotOf(key)].value; }
  const Value* Find(uint64_t key) const { return const_cast<RecycledMap*>(this)->Find(key); }

  // Returns the value at `key`. If there is none, adds one: new, or erased before and with its old
  // content.
  Value& Insert(uint64_t key) {
    if (2 * (size_ + 1) > slots_.size()) Grow();
    Slot& slot = slots_[SlotOf(key)];
    if (slot.value != nullptr) return *slot.value;
    if (spare_.empty()) spare_.push_back(&values_.emplace_back());
    slot = {key, spare_.back()};
    spare_.pop_back();
    ++size_;
    return *slot.value;
  }

  void Erase(uint64_t key) {
    if (size_ == 0) return;
    size_t free = SlotOf(key);
    if (slots_[free].value == nullptr) return;
    spare_.push_back(slots_[free].value);
    --size_;
    // Moves up the slots behind it that a search would no longer find past the free slot.
    const size_t mask = slots_.size() - 1;
    for (size_t at = (free + 1) & mask; slots_[at].value != nullptr; at = (at + 1) & mask) {
      const size_t home = Mix(slots_[at].key) & mask;
      if (((at - home) & mask) < ((at - free) & mask)) continue;
      slots_[free] = slots_[at];
      free = at;
    }
    slots_[free].value = nullptr;
  }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  // Calls visit(key, value) for each, in no order. `visit` must neither insert nor erase.
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (const Slot& slot : slots_) {
      if (slot.value != nullptr) visit(slot.key, std::as_const(*slot.value));
    }
  }
  template <typename Visit>
  void ForEach(Visit visit) {
    for (const Slot& slot : slots_) {
      if (slot.value != nullptr) visit(slot.key, *slot.value);
    }
  }

 private:
  struct Slot {
    uint64_t key = 0;
    Value* value = nullptr;  // null: the slot is free
  };

  // The slot of the key, or the free one that it would get.
  size_t SlotOf(uint64_t key) const {
    const size_t mask = slots_.size() - 1;
    size_t at = Mix(key) & mask;
    while (slots_[at].value != nullptr && slots_[at].key != key) at = (at + 1) & mask;
    return at;
  }

  void Grow() {
    std::vector<Slot> old(slots_.empty() ? 8 : 2 * slots_.size());
    std::swap(old, slots_);
    for (const Slot& slot : old) {
      if (slot.value != nullptr) slots_[SlotOf(slot.key)] = slot;
    }
  }

  std::vector<Slot> slots_;  // their number is a power of two; at most half are taken
  std::deque<Value> values_;
  std::vector<Value*> spare_;
  size_t size_ = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_CONTAINERS_H_
