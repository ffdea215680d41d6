// LatePlane: a data plane for tests whose exchanges end by events, late, out of order or never. Its
// ranks are threads of one process. A separate thread ends each exchange once all blocks from its
// peers have arrived and a delay has passed.
#ifndef THINWIRE_TESTS_TRANSPORT_LATE_PLANE_H_
#define THINWIRE_TESTS_TRANSPORT_LATE_PLANE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "transport/planes.h"

namespace thinwire {

struct LateOptions {
  // The time from an exchange's last block to its end on a rank. nullopt: the exchange never ends,
  // except by a failure. Must be a pure function of its arguments.
  using Delay = std::function<std::optional<Clock::duration>(int rank, uint64_t tag)>;

  Matching matching = Matching::kByTag;
  Delay delay = AtOnce();
  // true: an exchange ends after all that its rank started before, as on one stream.
  bool in_order = false;

  static Delay AtOnce();
  // A delay between 0 and `longest`, random by rank and tag.
  static Delay OutOfOrder(uint64_t seed, Clock::duration longest);
  static Delay NeverFor(std::set<uint64_t> tags, Delay otherwise = AtOnce());
};

// Returns a plane per rank. They may be destroyed in any order, but not within OnDone.
std::vector<std::unique_ptr<DataPlane>> MakeLatePlanes(int size, LateOptions options);

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_LATE_PLANE_H_
