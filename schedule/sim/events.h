// Events: a virtual clock. What is due at one time happens in the order in which it was asked for.
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
  void At(double when, Action action) { events_.push({when, ++asked_, std::move(action)}); }

  // Lets the next event happen; false if there is none.
  bool Next() {
    if (events_.empty()) return false;
    const Action action = std::move(events_.top().action);
    now_ = events_.top().when;
    events_.pop();
    action();
    return true;
  }

 private:
  struct Event {
    double when;
    uint64_t number;
    mutable Action action;  // moved out of the queue's constant top
    bool operator>(const Event& other) const {
      return std::tie(when, number) > std::tie(other.when, other.number);
    }
  };
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  uint64_t asked_ = 0;
  double now_ = 0.0;
};

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_EVENTS_H_
