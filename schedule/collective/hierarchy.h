// Decides if a hierarchy is worth it: seconds of an allreduce's bytes on the links inside nodes and
// between them, flat and by nodes. A pure function, so that all ranks decide alike.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_HIERARCHY_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_HIERARCHY_H_

#include <span>

#include "compress/codec_spec.h"
#include "schedule/collective/grid.h"

namespace thinwire {

// Bytes a second that a rank sends while all ranks do: its share of what its node's link carries.
struct LinkRates {
  double inside = 0.0, between = 0.0;
};

// Bytes that a rank sends for one element of a chunk, in the hops of an allreduce.
struct LinkBytes {
  double inside = 0.0, between = 0.0;
  double seconds(const LinkRates& rates) const {
    return inside / rates.inside + between / rates.between;
  }
};

// `nodes`: a row is a node. Of fp32 elements.
LinkBytes FlatBytes(const Grid& nodes, const CodecPair& codec);
LinkBytes HierarchicalBytes(const Grid& nodes, const CodecPair& codec);

// True if every dense codec gains kWorthIt by going by nodes; false if there is none.
bool HierarchyPays(const Grid& nodes, std::span<const CodecPair> codecs, const LinkRates& rates);

// Less could as well be the error of a measurement, and the bits of results would change from one
// start to the next.
inline constexpr double kWorthIt = 1.25;

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_HIERARCHY_H_
