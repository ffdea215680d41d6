// ChooseTopology: which way a group's dense allreduces go, decided alike on all ranks.
#ifndef THINWIRE_SCHEDULE_ENGINE_TOPOLOGY_H_
#define THINWIRE_SCHEDULE_ENGINE_TOPOLOGY_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "schedule/collective/hierarchy.h"
#include "schedule/options.h"
#include "transport/nodes.h"
#include "transport/transport.h"

namespace thinwire {

// The options with topology and local_size as they are in this group, and why in words.
struct ChosenTopology {
  Options options;
  std::string words;                    // such as "hierarchical: 2 nodes of 2 ranks"
  std::optional<LinkRates> rates = {};  // if they were measured
};

// Whether the choice needs to know the nodes, which costs a round of messages.
bool AsksForNodes(const Options& options, int world);

// All ranks call it, with the same options and nodes. kHierarchical is taken where there are nodes;
// kAuto takes it as well where the links inside are measured to be so much faster that it pays.
// Fails as ProbeLinks.
absl::StatusOr<ChosenTopology> ChooseTopology(const Options& options, const Nodes& nodes,
                                              Transport& transport, Deadline deadline);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_TOPOLOGY_H_
