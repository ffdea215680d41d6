// Server: work that is done one piece after the other, in the order in which it comes: by one
// thread, or by cores that all ranks share.
#ifndef THINWIRE_SCHEDULE_SIM_SERVER_H_
#define THINWIRE_SCHEDULE_SIM_SERVER_H_

#include <algorithm>

namespace thinwire::sim {

class Server {
 public:
  // `share`: seconds that it is busy for each second of work.
  explicit Server(double share = 1.0) : share_(share) {}

  // When that work will be done. All ranks have the same at the same time, and none of them is done
  // before it has had the time that it takes alone.
  double Take(double now, double seconds) {
    free_at_ = std::max(free_at_, now) + share_ * seconds;
    return std::max(free_at_, now + seconds);
  }

 private:
  const double share_;
  double free_at_ = 0.0;
};

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_SERVER_H_
