// RecycledMap: an unordered map whose nodes are used again, so that a steady state of inserting and
// erasing allocates nothing. Erased values are kept as they were, for the capacity of what they
// hold; whoever inserts sets them anew.
#ifndef THINWIRE_SCHEDULE_RECYCLED_MAP_H_
#define THINWIRE_SCHEDULE_RECYCLED_MAP_H_

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace thinwire {

template <typename Value>
class RecycledMap {
  using Map = std::unordered_map<uint64_t, Value>;

 public:
  // The value at `key`; null if there is none.
  Value* Find(uint64_t key) {
    const auto found = map_.find(key);
    return found == map_.end() ? nullptr : &found->second;
  }
  const Value* Find(uint64_t key) const { return const_cast<RecycledMap*>(this)->Find(key); }

  // A value at a key that has none: a new one, or an erased one with its old content.
  Value& Insert(uint64_t key) {
    if (spare_.empty()) return map_[key];
    typename Map::node_type node = std::move(spare_.back());
    spare_.pop_back();
    node.key() = key;
    return map_.insert(std::move(node)).position->second;
  }

  void Erase(uint64_t key) {
    if (typename Map::node_type node = map_.extract(key)) spare_.push_back(std::move(node));
  }

  size_t size() const { return map_.size(); }
  bool empty() const { return map_.empty(); }
  auto begin() { return map_.begin(); }
  auto end() { return map_.end(); }
  auto begin() const { return map_.begin(); }
  auto end() const { return map_.end(); }

 private:
  Map map_;
  std::vector<typename Map::node_type> spare_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_RECYCLED_MAP_H_
