// How a group comes together, in the order of Join: compare the options in the store; connect, with
// Gloo or within the process; find the nodes; choose the data plane, and connect further loops if
// it is Gloo's; measure the links, choose the topology and settle the options.
#include "schedule/join/join.h"

#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "schedule/join/agree.h"
#include "schedule/join/guards.h"
#include "schedule/join/handshake.h"
#include "schedule/join/planes.h"
#include "schedule/order/frames.h"
#include "transport/combined/combined.h"
#include "transport/gloo/gloo.h"
#include "transport/in_process/in_process.h"
#include "transport/planes.h"

namespace thinwire {
namespace {

absl::Status Check(const JoinOptions& in) {
  if (in.size < 1 || in.rank < 0 || in.rank >= in.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", in.rank, " of ", in.size, ": expected 0 <= rank < size"));
  }
  if (in.size > 1 && in.store == nullptr && in.local_group.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", in.rank, " got no place to meet its ",
                                                   in.size - 1, " peers at; give it a store"));
  }
  return CheckOptions(in.options);
}

// Lets ranks that are threads of one process find each other by a name.
class LocalHub {
 public:
  // Returns the hub of that name and size, which the first caller creates. It is deleted when
  // nobody holds it, so that the name can be used again.
  static std::shared_ptr<LocalHub> Of(const std::string& name, int size) {
    static absl::Mutex mu(absl::kConstInit);
    static std::map<std::pair<std::string, int>, std::weak_ptr<LocalHub>> hubs;
    const absl::MutexLock lock(&mu);
    std::erase_if(hubs, [](const auto& entry) { return entry.second.expired(); });
    std::weak_ptr<LocalHub>& place = hubs[{name, size}];
    std::shared_ptr<LocalHub> hub = place.lock();
    if (hub == nullptr) place = hub = std::make_shared<LocalHub>(size);
    return hub;
  }

  explicit LocalHub(int size)
      : store_(MakeInProcessStore()), transports_(MakeInProcessTransports(size)) {}

  const std::shared_ptr<Store>& store() const { return store_; }

  // The transport of a rank. InvalidArgument if that rank is connected already.
  absl::StatusOr<Transport> Connect(int rank) {
    const absl::MutexLock lock(&mu_);
    if (!transports_[rank].empty()) return std::move(transports_[rank]);
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", rank, " of this local group is connected already; destroy the group's ",
        "communicators first, or use another name"));
  }

 private:
  const std::shared_ptr<Store> store_;
  absl::Mutex mu_;
  std::vector<Transport> transports_ ABSL_GUARDED_BY(mu_);  // by rank; empty once taken
};

std::shared_ptr<LocalHub> HubOf(const JoinOptions& in) {
  if (in.local_group.empty()) return nullptr;
  return LocalHub::Of(absl::StrCat(in.local_group, "/", in.group), in.size);
}

std::string PrefixOf(const JoinOptions& in) { return absl::StrCat("thinwire/", in.group, "/"); }

// Spreads the data over options.loops sets of connections; the first set is that of `transport`,
// which keeps the control frames. If a rank dies meanwhile, the error names it at once; if one
// stops, when the deadline has passed.
absl::Status ConnectLoops(const Options& options, const GlooOptions& first, const Board& board) {
  if (options.loops == 1) return absl::OkStatus();
  Transport& transport = board.transport;
  GlooOptions gloo = first;
  gloo.store = std::make_shared<GuardedStore>(first.store, *transport.control);
  gloo.deadline = board.deadline;
  // Sends the reason over the first connections before any others close; otherwise ranks that
  // already have those would report this rank as lost.
  absl::Status why;
  gloo.last_words = [&](const absl::Status& incomplete) {
    if (!absl::IsDeadlineExceeded(incomplete)) why = TellWhy(*transport.control, incomplete);
    return PackFailure(incomplete);
  };
  std::vector<Transport> others;
  for (int loop = 1; loop < options.loops; ++loop) {
    gloo.prefix = absl::StrCat(first.prefix, "loop", loop, "/");
    absl::StatusOr<Transport> other = ConnectGloo(gloo);
    if (absl::IsDeadlineExceeded(other.status())) {
      // The rank that this status names may itself be waiting for the one at fault.
      transport.control->Abort(other.status());
      return FindSilentRanks(board, "connect all its loops");
    }
    if (!other.ok()) return why.ok() ? TellWhy(*transport.control, other.status()) : why;
    others.push_back(*std::move(other));
  }
  transport.data = std::make_unique<Spread>(std::move(transport.data), std::move(others));
  return absl::OkStatus();
}

absl::StatusOr<Joined> FindWay(const Options& options, Nodes nodes, std::string words,
                               Transport& transport, Deadline deadline) {
  const Failure::Listener hears_of_lost_peers =
      transport.control->failure()->PassOn(transport.data->failure());
  absl::StatusOr<ChosenTopology> chosen = ChooseTopology(
      options, nodes, {"links", transport.members(), transport, 0, deadline, options.timeout});
  if (!chosen.ok()) return chosen.status();
  return Joined{std::move(chosen->options),
                Transport(),
                std::move(words),
                std::move(chosen->words),
                std::move(nodes),
                chosen->rates,
                {}};
}

// True if ranks that Gloo has connected wait for one another before they have an engine. Probing
// the links is not counted: it comes later, and has its own deadline.
bool WaitsFurther(const Options& options, int size) {
  return options.transport != TransportKind::kGloo || options.loops > 1 ||
         AsksForNodes(options, size);
}

// The remaining steps for ranks that Gloo has connected. If they wait for one another, they share
// one deadline; otherwise the first to give up would name ranks that only wait for another one.
absl::StatusOr<Joined> Agree(const JoinOptions& in, const GlooOptions& gloo, Transport& transport) {
  const Options& options = in.options;
  Deadline deadline = gloo.deadline;
  const auto board = [&](const char* subject) {
    return Board{subject, transport.members(), transport, 0, deadline, options.timeout};
  };
  if (WaitsFurther(options, in.size)) {
    const absl::StatusOr<Deadline> earliest = EarliestDeadline(board("group"));
    if (!earliest.ok()) return earliest.status();
    deadline = *earliest;
  }
  absl::StatusOr<Nodes> nodes = LocateRanks(options, in.device.get(), board("node"));
  if (!nodes.ok()) return nodes.status();
  const auto connect_loops = [&] { return ConnectLoops(options, gloo, board("loops")); };
  absl::StatusOr<std::string> words = ChooseDataPlane({.kind = options.transport,
                                                       .deadline = deadline,
                                                       .timeout = options.timeout,
                                                       .device = in.device,
                                                       .host_memory = options.checksum,
                                                       .local_size = nodes->local_size,
                                                       .loops = options.loops,
                                                       .connect_loops = connect_loops,
                                                       .ucx_library = in.ucx_library,
                                                       .nccl_library = in.nccl_library},
                                                      transport);
  if (!words.ok()) return words.status();
  return FindWay(options, *std::move(nodes), *std::move(words), transport, deadline);
}

}  // namespace

absl::StatusOr<Joined> Join(const JoinOptions& in) {
  if (absl::Status bad = Check(in); !bad.ok()) return FailToJoin(in, std::move(bad));
  const Options& options = in.options;
  if (in.size == 1) {
    absl::StatusOr<Roster> alone = Roster::Of(in.epoch, {in.member});
    if (!alone.ok()) return alone.status();
    return Joined{Settle(options, 1), Transport(), "one rank", "one rank", Nodes(), {}, *alone};
  }
  const Deadline deadline = Clock::now() + options.timeout;
  const std::shared_ptr<LocalHub> hub = HubOf(in);
  const std::shared_ptr<Store> store = hub != nullptr ? hub->store() : in.store;
  const std::string prefix = PrefixOf(in);
  absl::StatusOr<Roster> roster =
      Handshake(*store, prefix, in.rank, in.size, options, deadline, in.member, in.epoch);
  if (!roster.ok()) return roster.status();
  const GlooOptions gloo = {.rank = in.rank,
                            .size = in.size,
                            .store = store,
                            .prefix = prefix,
                            .interface = in.interface,
                            .rendezvous_host = in.rendezvous_host,
                            .deadline = deadline,
                            .key_file = in.key_file,
                            .digest = Digest(in.size, options),
                            .congestion = in.congestion,
                            .last_words = [](const absl::Status& why) { return PackFailure(why); }};
  absl::StatusOr<Transport> transport = hub != nullptr ? hub->Connect(in.rank) : ConnectGloo(gloo);
  if (!transport.ok()) return transport.status();
  const int local_size = options.local_size != 0 ? options.local_size : in.size;
  absl::StatusOr<Joined> joined = hub != nullptr
                                      ? FindWay(options, NodesOf(in.size, local_size),
                                                "memory of this process", *transport, deadline)
                                      : Agree(in, gloo, *transport);
  if (!joined.ok()) return GiveUp(*transport, joined.status());
  joined->transport = *std::move(transport);
  joined->roster = *std::move(roster);
  return joined;
}

absl::Status FailToJoin(const JoinOptions& in, absl::Status why) {
  if (in.size < 2 || in.rank < 0 || in.rank >= in.size) return why;
  const std::shared_ptr<LocalHub> hub = HubOf(in);
  const std::shared_ptr<Store> store = hub != nullptr ? hub->store() : in.store;
  return store == nullptr ? why : FailHandshake(*store, PrefixOf(in), in.rank, std::move(why));
}

}  // namespace thinwire
