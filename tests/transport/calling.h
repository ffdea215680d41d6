// One rank's part of connecting, for tests in which it does only that.
#ifndef THINWIRE_TESTS_TRANSPORT_CALLING_H_
#define THINWIRE_TESTS_TRANSPORT_CALLING_H_

#include <gtest/gtest.h>
#include <poll.h>

#include <span>
#include <vector>

#include "transport/mesh/group_key.h"
#include "transport/mesh/half_open.h"
#include "transport/mesh/mesh.h"

namespace thinwire {

// Calls the lower ranks, which this rank has met, until it is connected to `awaited`. Returns the
// connections by rank.
inline std::vector<Descriptor> CallUntilConnected(int awaited, const MeshOptions& options,
                                                  const Meeting& meeting) {
  const Identity self{options.rank, options.size, meeting.key,
                      HmacSha256(options.prefix, options.digest)};
  Callers callers(self, meeting.addresses);
  std::vector<Descriptor> connected(options.size);
  std::vector<pollfd> polled;
  while (!connected[awaited].valid() && Clock::now() < options.deadline) {
    polled.clear();
    callers.AddAwaited(polled);
    poll(polled.data(), polled.size(), 1);
    std::span<const pollfd> events = polled;
    EXPECT_TRUE(callers.Advance(events, connected).ok());
  }
  return connected;
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_CALLING_H_
