// LatePlane: a data plane for tests, whose exchanges end by events, late, out of order or never.
// Its ranks are threads of one process. One thread of its own ends all exchanges, each after all
// blocks from its peers have come and a delay has passed.
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
  // How long after its last block has come an exchange ends on a rank. Nothing means never: the
  // exchange ends by a failure only. A pure function of its arguments.
  using Delay = std::function<std::optional<Clock::duration>(int rank, uint64_t tag)>;

  Matching matching = Matching::kByTag;
  Delay delay = AtOnce();
  // Whether an exchange ends only after all that its rank has started before it, as on one stream.
  bool in_order = false;

  static Delay AtOnce();
  // A delay between 0 and `longest`, drawn for each rank and tag.
  static Delay OutOfOrder(uint64_t seed, Clock::duration longest);
  static Delay NeverFor(std::set<uint64_t> tags, Delay otherwise = AtOnce());
};

// One plane per rank, to be destroyed in any order, but not in an OnDone.
std::vector<std::unique_ptr<DataPlane>> MakeLatePlanes(int size, LateOptions options);

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_LATE_PLANE_H_
