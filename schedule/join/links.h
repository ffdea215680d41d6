// Where the ranks of a group are, how fast the links between them are, and which way the group's
// dense allreduces go therefore: decided alike on all ranks.
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

// A node is the processes of one running kernel in one network namespace, so what goes between them
// passes no network. Text that is equal in two processes only if they are on one.
std::string NodeIdentity();

// A world that is cut into nodes of local_size ranks, which are neighbours: [0, local_size) and so
// on.
struct Nodes {
  int local_size = 1;
  std::string refusal = {};  // why the ranks are not several such nodes; empty if they are
  bool direct = true;        // devices inside them use one another's memory
  bool linked = false;       // over links of their own, such as NVLink
  bool one = false;          // all ranks are on one node
};

// The nodes of ranks with these identities, by rank.
Nodes NodesOf(std::span<const std::string> identities);
// The nodes that the user asked for.
Nodes NodesOf(int world, int local_size);

// True if the topology or the transport depends on nodes that the user did not give.
bool AsksForNodes(const Options& options, int world);

// The nodes of the board's members, the same on all of them: of options.local_size ranks, else, if
// AsksForNodes, as every rank tells its identity. Fails as TellAll.
//
// `device`: this rank's, where tensors lie; null: the host. It is asked where the topology is kAuto
// and tensors may go from device to device. One rank whose device reaches another one through host
// memory makes Nodes::direct false for all.
absl::StatusOr<Nodes> LocateRanks(const Options& options, const Device* device, const Board& board);

// The rates of the slowest ranks, the same on all, which all call it. The board has all ranks of
// the transport, whose data plane is of the host's memory and fails with the control plane. Takes
// ten exchanges of 64 KiB a rank, and, where these take less than 10 ms, six of 1 MiB.
// DeadlineExceeded names those that FindSilentRanks finds when the first rank's deadline has
// passed.
absl::StatusOr<LinkRates> ProbeLinks(const Grid& nodes, const Board& board);

// The options as they are in this group, and why in words.
struct ChosenTopology {
  Settled options;
  std::string words;                    // such as "hierarchical: 2 nodes of 2 ranks"
  std::optional<LinkRates> rates = {};  // if they were measured
};

// All ranks call it, with the same options, which CheckOptions has passed, and the same nodes.
// kHierarchical is taken where there are nodes, and kGrid takes them as rows. For kAuto between
// devices, kHierarchical is taken as well, since a flat exchange may send more over a node's
// network card than an uncompressed ring; and kGrid, which sends encoded elements inside nodes too,
// where Nodes::direct is false; on one node whose devices are linked the words say that compression
// gains nothing. For kAuto between hosts, kHierarchical is taken where the links
// inside are measured to be so much faster that it pays. Fails as ProbeLinks.
absl::StatusOr<ChosenTopology> ChooseTopology(const Options& options, const Nodes& nodes,
                                              const Board& board);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_JOIN_LINKS_H_
