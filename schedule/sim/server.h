// Server: does one piece of work after another, in order of arrival: one thread, or cores that all
// ranks share.
#ifndef THINWIRE_SCHEDULE_SIM_SERVER_H_
#define THINWIRE_SCHEDULE_SIM_SERVER_H_

#include <algorithm>

namespace thinwire::sim {

class Server {
 public:
  // `share`: seconds that the server is busy per second of work.
  explicit Server(double share = 1.0) : share_(share) {}

  // Returns when the work of `seconds` will be done. All ranks have the same work at the same time,
  // and none is done sooner than it would be alone.
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
