#include "schedule/join/links.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "schedule/hash.h"
#include "schedule/join/agree.h"
#include "schedule/join/guards.h"

namespace thinwire {
namespace {

Nodes Refused(std::string refusal) { return {1, std::move(refusal)}; }

// Used in place of the kernel's boot id if that can't be read.
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
  if (local_size >= world) {
    Nodes nodes = Refused("all ranks are on one node");
    nodes.one = true;
    return nodes;
  }
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

namespace {

bool MayGoByNodes(const Options& options) { return options.topology != Topology::kFlat; }

}  // namespace

bool AsksForNodes(const Options& options, int world) {
  constexpr int kLeastWorld = 4;  // two nodes of two ranks
  return options.local_size == 0 &&
         (options.transport == TransportKind::kAuto || options.transport == TransportKind::kNccl ||
          (world >= kLeastWorld && MayGoByNodes(options)));
}

namespace {

absl::StatusOr<Nodes> FindNodes(const Options& options, const Board& board) {
  const int world = board.members.size;
  if (options.local_size != 0) return NodesOf(world, options.local_size);
  if (!AsksForNodes(options, world)) return NodesOf(world, 1);
  const absl::StatusOr<Answers> answers = TellAll(board, "identity", NodeIdentity());
  if (!answers.ok()) return answers.status();
  if (absl::Status refusal = FirstRefusal(board, *answers); !refusal.ok()) return refusal;
  std::vector<std::string> identities;
  for (const absl::StatusOr<std::string>& answer : *answers) identities.push_back(*answer);
  return NodesOf(identities);
}

// The ranks' answers for how their devices reach others.
constexpr char kHostMemory[] = "host", kBus[] = "bus", kLink[] = "link";

// A device that does not answer counts as kBus: it fails the group later, with a better reason.
std::string ReachOf(const Device* device) {
  const absl::StatusOr<PeerReach> reach =
      device == nullptr ? PeerReach::kBus : device->ReachesPeers();
  if (reach.ok() && *reach == PeerReach::kHostMemory) return kHostMemory;
  return reach.ok() && *reach == PeerReach::kLink ? kLink : kBus;
}

}  // namespace

absl::StatusOr<Nodes> LocateRanks(const Options& options, const Device* device,
                                  const Board& board) {
  absl::StatusOr<Nodes> nodes = FindNodes(options, board);
  const bool asks =
      options.topology == Topology::kAuto &&
      (options.transport == TransportKind::kAuto || options.transport == TransportKind::kNccl);
  if (!nodes.ok() || !asks || !(nodes->refusal.empty() || nodes->one)) return nodes;
  const absl::StatusOr<Answers> answers = TellAll(board, "peers", ReachOf(device));
  if (!answers.ok()) return answers.status();
  const auto says = [](const char* word) {
    return [word](const auto& answer) { return answer.ok() && *answer == word; };
  };
  nodes->direct = std::none_of(answers->begin(), answers->end(), says(kHostMemory));
  nodes->linked = std::all_of(answers->begin(), answers->end(), says(kLink));
  return nodes;
}

namespace {

constexpr size_t kSmall = size_t{64} << 10, kLarge = size_t{1} << 20;
constexpr double kShort = 10e-3;  // seconds
constexpr int kWarmUp = 2, kRepetitions = 3;

// Seconds of one exchange.
struct Times {
  double inside = 0.0, between = 0.0;
};

class Probe {
 public:
  Probe(const Grid& nodes, const Board& board)
      : nodes_(nodes), board_(board), plane_(*board.transport.data), out_(kLarge), in_(kLarge) {}

  absl::StatusOr<LinkRates> Run() {
    // Warm-up: the first exchanges wait for late ranks, and for idle connections.
    for (int i = 0; i < kWarmUp; ++i) {
      if (const absl::StatusOr<Times> times = Slowest(kSmall, 1); !times.ok()) {
        return times.status();
      }
    }
    size_t bytes = kSmall;
    absl::StatusOr<Times> times = Slowest(bytes, kRepetitions);
    if (times.ok() && times->inside + times->between < kShort) {
      bytes = kLarge;
      times = Slowest(bytes, kRepetitions);
    }
    if (!times.ok()) return times.status();
    const auto rate = [bytes](double seconds) {
      return static_cast<double>(bytes) / std::max(seconds, 1e-9);
    };
    return LinkRates{rate(times->inside), rate(times->between)};
  }

 private:
  // All ranks send at the same time, first to the next in their row, then to the next in the
  // column.
  absl::StatusOr<Times> Slowest(size_t bytes, int repetitions) {
    const int row = nodes_.row(plane_.rank()), column = nodes_.column(plane_.rank());
    const auto in_row = [&](int step) {
      return nodes_.rank(row, (column + step + nodes_.columns) % nodes_.columns);
    };
    const auto in_column = [&](int step) {
      return nodes_.rank((row + step + nodes_.rows) % nodes_.rows, column);
    };
    const absl::StatusOr<double> inside = Best(in_row(1), in_row(-1), bytes, repetitions);
    if (!inside.ok()) return inside.status();
    const absl::StatusOr<double> between = Best(in_column(1), in_column(-1), bytes, repetitions);
    if (!between.ok()) return between.status();
    return OfAll({*inside, *between});
  }

  absl::StatusOr<double> Best(int to, int from, size_t bytes, int repetitions) {
    std::vector<Bytes> send(plane_.size());
    std::vector<MutableBytes> recv(plane_.size());
    send[to] = Bytes(out_).first(bytes);
    recv[from] = MutableBytes(in_).first(bytes);
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < repetitions; ++i) {
      const Clock::time_point begin = Clock::now();
      if (absl::Status bad = Exchange(send, recv); !bad.ok()) return bad;
      best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
    }
    return best;
  }

  // The longest times over all ranks.
  absl::StatusOr<Times> OfAll(Times mine) {
    const std::string topic = absl::StrCat("times ", exchanges_);
    const absl::StatusOr<Answers> answers =
        TellAll(board_, topic, std::string(reinterpret_cast<const char*>(&mine), sizeof(mine)));
    if (!answers.ok()) return answers.status();
    for (const absl::StatusOr<std::string>& answer : *answers) {
      if (!answer.ok() || answer->size() != sizeof(Times)) continue;
      Times other;
      std::memcpy(&other, answer->data(), sizeof(other));
      mine = {std::max(mine.inside, other.inside), std::max(mine.between, other.between)};
    }
    return mine;
  }

  absl::Status Exchange(std::span<const Bytes> send, std::span<const MutableBytes> recv) {
    const uint64_t tag = HashCombine(HashBytes("thinwire link probe"), ++exchanges_);
    return plane_.Start(tag, send, recv)->Wait(Deadline::max());
  }

  const Grid nodes_;
  const Board& board_;
  DataPlane& plane_;
  const std::vector<uint8_t> out_;
  std::vector<uint8_t> in_;
  uint64_t exchanges_ = 0;
};

}  // namespace

absl::StatusOr<LinkRates> ProbeLinks(const Grid& nodes, const Board& given) {
  Board board = given;
  const absl::StatusOr<Deadline> end = EarliestDeadline(board);
  if (!end.ok()) return end.status();
  board.deadline = *end;
  absl::StatusOr<LinkRates> rates = LinkRates{};
  {
    const Alarm alarm(*board.transport.control, board.deadline);
    rates = Probe(nodes, board).Run();
  }
  if (absl::IsDeadlineExceeded(rates.status())) return FindSilentRanks(board, "measure its links");
  return rates;
}

namespace {

std::string Megabytes(double bytes_per_s) {
  return absl::StrCat(static_cast<int64_t>(std::lround(bytes_per_s / 1e6)), " MB/s");
}

std::string WordsOf(const Settled& options, const std::string& reason) {
  const std::string way = DescribeWay(options.world(), *options);
  return reason.empty() ? way : absl::StrCat(way, ", ", reason);
}

}  // namespace

absl::StatusOr<ChosenTopology> ChooseTopology(const Options& asked, const Nodes& nodes,
                                              const Board& board) {
  const int world = board.members.size;
  const bool on_gpus = board.transport.data->traits().memory != Memory::kHost;
  Options options = asked;
  if (on_gpus) options.transport = TransportKind::kNccl;  // kAuto may have chosen it
  const auto unmeasured = [&](const Options& chosen, const std::string& reason) {
    const Settled settled = Settle(chosen, world);
    return ChosenTopology{settled, WordsOf(settled, reason)};
  };
  if (!MayGoByNodes(options)) return unmeasured(options, "");
  if (!nodes.refusal.empty()) {
    const bool pays_nothing = nodes.one && nodes.linked && on_gpus;
    return unmeasured(options,
                      options.topology == Topology::kGrid ? ""
                      : pays_nothing
                          ? "do not compress: all ranks are on one node, whose GPUs are joined by "
                            "NVLink, and NCCL's own allreduce is faster there"
                          : nodes.refusal);
  }
  Options by_nodes = options;
  by_nodes.local_size = nodes.local_size;
  if (options.topology != Topology::kAuto) return unmeasured(by_nodes, "");
  if (on_gpus) {
    by_nodes.topology = nodes.direct ? Topology::kHierarchical : Topology::kGrid;
    return unmeasured(by_nodes, nodes.direct
                                    ? "as between GPUs of several nodes"
                                    : "as between GPUs of several nodes that meet in host memory");
  }
  const Grid grid{world / nodes.local_size, nodes.local_size};
  const absl::StatusOr<LinkRates> rates = ProbeLinks(grid, board);
  if (!rates.ok()) return rates.status();
  const Settled settled = Settle(by_nodes, world, *rates);
  const std::string measured =
      absl::StrCat("each rank sends ", Megabytes(rates->inside), " inside nodes of ", grid.columns,
                   " and ", Megabytes(rates->between), " between them");
  return ChosenTopology{settled, WordsOf(settled, measured), *rates};
}

}  // namespace thinwire
