#include "transport/nodes.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

Nodes Refused(std::string refusal) { return {1, std::move(refusal)}; }

// Where the kernel does not say which run it is, the host's name stands for it.
std::string HostName() {
  std::array<char, 256> name = {};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

}  // namespace

std::string NodeIdentity() {
  std::string kernel;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> kernel;
  if (kernel.empty()) kernel = HostName();
  std::error_code unknown;
  return absl::StrCat(kernel, " ",
                      std::filesystem::read_symlink("/proc/self/ns/net", unknown).string());
}

Nodes NodesOf(int world, int local_size) {
  if (local_size < 2) return Refused("a node has one rank");
  if (local_size >= world) return Refused("all ranks are on one node");
  if (world % local_size != 0) {
    return Refused(absl::StrCat(world, " ranks are not whole nodes of ", local_size));
  }
  return {local_size, ""};
}

Nodes NodesOf(std::span<const std::string> identities) {
  const auto other = std::find_if(identities.begin(), identities.end(),
                                  [&](const std::string& id) { return id != identities[0]; });
  const int first = static_cast<int>(std::distance(identities.begin(), other));
  const int world = static_cast<int>(identities.size());
  for (int rank = 0; rank < world; ++rank) {
    const bool begins = rank % first == 0;
    const auto before = identities.first(rank);
    const bool is_new = std::find(before.begin(), before.end(), identities[rank]) == before.end();
    if (begins == is_new && (begins || identities[rank] == identities[rank - 1])) continue;
    return Refused(absl::StrCat("rank 0's node begins with ", first, " ranks, but rank ", rank,
                                " is on ", is_new ? "another one" : "one that is there already",
                                ": nodes must have as many ranks each, which are neighbours"));
  }
  return NodesOf(world, first);
}

absl::StatusOr<Nodes> FindNodes(const Board& board) {
  const absl::StatusOr<Answers> answers = TellAll(board, "identity", NodeIdentity());
  if (!answers.ok()) return answers.status();
  if (absl::Status refusal = FirstRefusal(board, *answers); !refusal.ok()) return refusal;
  std::vector<std::string> identities;
  for (const absl::StatusOr<std::string>& answer : *answers) identities.push_back(*answer);
  return NodesOf(identities);
}

}  // namespace thinwire
