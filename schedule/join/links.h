// Finds which nodes the ranks of a group are on and how fast the links between them are, and
// chooses how dense allreduces go; all ranks decide alike.
#ifndef THINWIRE_SCHEDULE_JOIN_LINKS_H_
#define THINWIRE_SCHEDULE_JOIN_LINKS_H_

#include <chrono>
#include <optional>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "compress/device.h"
#include "schedule/collective/partition.h"
#include "schedule/collective/settle.h"
#include "schedule/join/agree.h"
#include "schedule/options.h"

namespace thinwire {

// Text that is equal in two processes only if they are on one node: processes of one running kernel
// in one network namespace, so bytes between them pass no network.
std::string NodeIdentity();

// A world cut into nodes: node i has ranks [i * local_size, (i + 1) * local_size).
struct Nodes {
  int local_size = 1;
  std::string refusal = {};  // why the ranks do not form several such nodes; empty if they do
  bool direct = true;        // devices of a node can access one another's memory
  bool linked = false;       // over dedicated links, such as NVLink
  bool one = false;          // all ranks are on one node
};

// The nodes of ranks with these NodeIdentity texts, by rank.
Nodes NodesOf(std::span<const std::string> identities);
// The nodes of `local_size` ranks that the user asked for.
Nodes NodesOf(int world, int local_size);

// True if the topology or the transport depends on nodes that the user did not give.
bool AsksForNodes(const Options& options, int world);

// Returns the nodes of the board's members, the same on all of them: of options.local_size ranks,
// or, if AsksForNodes, from the identities that the ranks send. Fails like TellAll.
//
// `device`: where this rank's tensors lie; null: the host. Asked how it reaches its peers if the
// topology is kAuto and tensors may go from device to device. If one rank's device reaches another
// only through host memory, Nodes::direct is false on all ranks.
absl::StatusOr<Nodes> LocateRanks(const Options& options, const Device* device, const Board& board);

// Returns the rates of the slowest ranks, the same on all ranks. All ranks must call it. The board
// must have all ranks of the transport, whose data plane moves host memory and fails with the
// control plane. Takes ten exchanges of 64 KiB per rank, and six of 1 MiB if the former take less
// than 10 ms. DeadlineExceeded names the ranks that FindSilentRanks finds when the earliest
// deadline has passed.
absl::StatusOr<LinkRates> ProbeLinks(const Grid& nodes, const Board& board);

// The options settled for this group, and the reason in words.
struct ChosenTopology {
  Settled options;
  std::string words;                    // such as "hierarchical: 2 nodes of 2 ranks"
  std::optional<LinkRates> rates = {};  // if they were measured
};

// All ranks must call it, with the same options (which CheckOptions has passed) and nodes. If there
// are nodes, kHierarchical uses them, and kGrid takes them as rows. kAuto between devices of
// several nodes becomes kHierarchical, since a flat exchange may send more over a node's network
// card than an uncompressed ring; but kGrid, which sends encoded elements inside nodes too, if
// Nodes::direct is false; on a single node with linked devices the words say that compression gains
// nothing. kAuto between hosts becomes kHierarchical if the measured links inside nodes are so much
// faster that it pays. Fails like ProbeLinks.
absl::StatusOr<ChosenTopology> ChooseTopology(const Options& options, const Nodes& nodes,
                                              const Board& board);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_JOIN_LINKS_H_
