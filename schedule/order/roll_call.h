// RollCall: which peers answer. Whoever waits for a tensor asks ahead of its deadline, so that it
// knows at the deadline who is silent. Pure logic. Not thread-safe.
#ifndef THINWIRE_SCHEDULE_ORDER_ROLL_CALL_H_
#define THINWIRE_SCHEDULE_ORDER_ROLL_CALL_H_

#include <algorithm>
#include <limits>
#include <vector>

namespace thinwire {

// How long a peer may owe an answer before it is silent, by the group's timeout, in seconds: on a
// busy link the answer waits behind chunks, and on a busy machine for a processor.
inline double AnswerPatience(double timeout) { return std::clamp(timeout / 20, 0.25, 1.5); }

class RollCall {
 public:
  // Times are seconds of any one clock. A peer that owes no answer is asked again after `pause`; it
  // is silent once it has owed one for `patience`.
  RollCall(int world, double pause, double patience)
      : pause_(pause), patience_(patience), peers_(world) {}

  // True if the peer is to be asked now, and has been asked then.
  bool Ask(int peer, double now) {
    Peer& p = peers_[peer];
    if (p.owes || now < p.asked + pause_) return false;
    p.owes = true;
    p.asked = now;
    return true;
  }
  void OnAnswer(int peer) { peers_[peer].owes = false; }

  bool IsSilent(int peer, double now) const {
    return peers_[peer].owes && now >= peers_[peer].asked + patience_;
  }
  // True if every peer has answered or is silent.
  bool IsSettled(double now) const {
    for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
      if (peers_[peer].owes && !IsSilent(peer, now)) return false;
    }
    return true;
  }
  std::vector<int> Silent(double now) const {
    std::vector<int> silent;
    for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
      if (IsSilent(peer, now)) silent.push_back(peer);
    }
    return silent;
  }

 private:
  struct Peer {
    double asked = -std::numeric_limits<double>::infinity();
    bool owes = false;
  };
  const double pause_, patience_;
  std::vector<Peer> peers_;  // by rank
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_ROLL_CALL_H_
