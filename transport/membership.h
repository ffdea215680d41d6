#ifndef THINWIRE_TRANSPORT_MEMBERSHIP_H_
#define THINWIRE_TRANSPORT_MEMBERSHIP_H_

namespace thinwire {

// This process's place in a group. The members are numbered from 0 to size - 1, and nobody joins or
// is renumbered later: a group that loses a member fails.
struct Membership {
  int rank = 0;
  int size = 1;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MEMBERSHIP_H_
