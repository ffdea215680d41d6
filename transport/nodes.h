// Nodes: which ranks of a group are on one machine.
#ifndef THINWIRE_TRANSPORT_NODES_H_
#define THINWIRE_TRANSPORT_NODES_H_

#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "transport/board.h"

namespace thinwire {

// A node is the processes of one running kernel in one network namespace, so what goes between them
// passes no network. Text that is equal in two processes only if they are on one.
std::string NodeIdentity();

// A world that is cut into nodes of local_size ranks, which are neighbours: [0, local_size) and so
// on.
struct Nodes {
  int local_size = 1;
  std::string refusal;  // why the ranks are not several such nodes; empty if they are
};

// Of the ranks' identities, by rank.
Nodes NodesOf(std::span<const std::string> identities);
// The user's word on it.
Nodes NodesOf(int world, int local_size);

// Every rank tells its identity; the result is the same on all. Fails as TellAll does.
absl::StatusOr<Nodes> FindNodes(const Board& board);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_NODES_H_
