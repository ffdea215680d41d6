// Events: a virtual clock. Actions due at the same time run in the order in which they were added.
#ifndef THINWIRE_SCHEDULE_SIM_EVENTS_H_
#define THINWIRE_SCHEDULE_SIM_EVENTS_H_

#include <cstdint>
#include <functional>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

namespace thinwire::sim {

class Events {
 public:
  using Action = std::function<void()>;

  double now() const { return now_; }  // seconds

  void After(double seconds, Action action) { At(now_ + seconds, std::move(action)); }
  void At(double when, Action action) {
    uint32_t slot = static_cast<uint32_t>(actions_.size());
    if (free_.empty()) {
      actions_.push_back(std::move(action));
    } else {
      slot = free_.back();
      free_.pop_back();
      actions_[slot] = std::move(action);
    }
    due_.push({when, ++asked_, slot});
  }

  // Runs the next action; false if there is none.
  bool Next() {
    if (due_.empty()) return false;
    const Due next = due_.top();
    due_.pop();
    now_ = next.when;
    const Action action = std::move(actions_[next.slot]);
    free_.push_back(next.slot);
    action();
    return true;
  }

 private:
  // The queue holds plain values, since it moves them often; each action is moved only once.
  struct Due {
    double when;
    uint64_t number;
    uint32_t slot;
    bool operator>(const Due& other) const {
      return std::tie(when, number) > std::tie(other.when, other.number);
    }
  };
  std::priority_queue<Due, std::vector<Due>, std::greater<>> due_;
  std::vector<Action> actions_;  // by slot
  std::vector<uint32_t> free_;   // free slots
  uint64_t asked_ = 0;
  double now_ = 0.0;
};

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_EVENTS_H_
