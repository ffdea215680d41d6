// LatencyProbe: rank 0 measures how far its peers are, by a few pings to each before anything else:
// on a busy link an answer waits behind chunks. Pure logic. Not thread-safe.
#ifndef THINWIRE_SCHEDULE_ORDER_LATENCY_PROBE_H_
#define THINWIRE_SCHEDULE_ORDER_LATENCY_PROBE_H_

#include <algorithm>
#include <limits>
#include <vector>

namespace thinwire {

class LatencyProbe {
 public:
  static constexpr int kPings = 5;  // of a peer; the least time counts

  explicit LatencyProbe(int world) : peers_(world) {}

  // A ping to `peer` leaves. Times are seconds of any one clock.
  void OnPing(int peer, double now) { peers_[peer].sent = now; }

  // True if the peer is to be asked again.
  bool OnPong(int peer, double now) {
    Peer& p = peers_[peer];
    p.round_trip = std::min(p.round_trip, now - p.sent);
    if (++p.answers < kPings) return true;
    if (p.answers == kPings) ++measured_;
    return false;
  }

  bool complete() const { return measured_ + 1 == static_cast<int>(peers_.size()); }

  // One way, to the farthest peer that was measured, in seconds.
  double latency_s() const {
    double farthest = 0.0;
    for (const Peer& p : peers_) {
      if (p.answers > 0) farthest = std::max(farthest, p.round_trip / 2);
    }
    return farthest;
  }

 private:
  struct Peer {
    double sent = 0.0;
    double round_trip = std::numeric_limits<double>::max();
    int answers = 0;
  };
  std::vector<Peer> peers_;  // by rank
  int measured_ = 0;         // peers with all their answers
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_LATENCY_PROBE_H_
