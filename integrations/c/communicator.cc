#include "integrations/c/communicator.h"

#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "integrations/c/callback_store.h"
#include "integrations/c/local_hub.h"
#include "integrations/c/options.h"
#include "integrations/c/text.h"
#include "kernels/device.h"
#include "schedule/engine/handshake.h"
#include "schedule/engine/topology.h"
#include "transport/choice.h"
#include "transport/gloo/gloo.h"

namespace thinwire {
namespace {

// Where the ranks of a group meet; `hub` if all of them are communicators of this process.
struct Meeting {
  std::shared_ptr<Store> store;
  std::shared_ptr<LocalHub> hub;
};

absl::StatusOr<Meeting> MeetingOf(const tw_options& in) {
  if (in.store.set != nullptr && in.store.get != nullptr) {
    return Meeting{MakeCallbackStore(in.store), nullptr};
  }
  if (in.local_group != nullptr) {
    const std::shared_ptr<LocalHub> hub =
        LocalHub::Of(absl::StrCat(in.local_group, "/", std::string(TextOf(in.group))), in.size);
    return Meeting{hub->store(), hub};
  }
  if (in.store_path != nullptr) return Meeting{MakeFileStore(in.store_path), nullptr};
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", in.rank, " got no place to meet its ", in.size - 1,
                   " peers at; set options.store, options.store_path or options.local_group"));
}

// Null for the host.
absl::StatusOr<std::shared_ptr<Device>> DeviceOf(const tw_options& in) {
  const std::string name = std::string(TextOf(in.device));
  if (name.empty() || name == "cpu") return std::shared_ptr<Device>();
  absl::StatusOr<std::shared_ptr<Device>> device =
      OpenDevice(name, std::string(TextOf(in.cuda_library)));
  if (device.ok()) return device;
  return absl::Status(device.status().code(),
                      absl::StrCat("rank ", in.rank, ": ", device.status().message()));
}

absl::Status CheckWorld(const tw_options& in) {
  if (in.size >= 1 && in.rank >= 0 && in.rank < in.size && in.timeout_ms >= 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("rank ", in.rank, " of ", in.size, ", timeout ",
                                                 in.timeout_ms, " ms: expected 0 <= rank < size ",
                                                 "and a timeout that is not negative"));
}

// The planes of a group, what its data runs on, in words, and where its ranks are.
struct Connected {
  Transport transport;
  std::string words;
  Nodes nodes;
};

// As the user says, else as the ranks find it if somebody wants to know.
absl::StatusOr<Nodes> LocateRanks(const Options& options, const Board& board) {
  const int world = board.members.size;
  if (options.local_size != 0) return NodesOf(world, options.local_size);
  const bool wanted = AsksForNodes(options, world) || options.transport == TransportKind::kAuto;
  return wanted ? FindNodes(board) : NodesOf(world, 1);
}

absl::StatusOr<Connected> Connect(const tw_options& in, const Options& options,
                                  const std::shared_ptr<Device>& device) {
  const absl::StatusOr<Meeting> meeting = MeetingOf(in);
  if (!meeting.ok()) return meeting.status();
  const std::shared_ptr<Store>& store = meeting->store;
  const Deadline deadline = Clock::now() + options.timeout;
  const std::string prefix = absl::StrCat("thinwire/", std::string(TextOf(in.group)), "/");
  if (absl::Status differs = Handshake(*store, prefix, in.rank, in.size, options, deadline);
      !differs.ok()) {
    return differs;
  }
  if (meeting->hub != nullptr) {
    absl::StatusOr<Transport> local = meeting->hub->Connect(in.rank);
    if (!local.ok()) return local.status();
    const int local_size = options.local_size != 0 ? options.local_size : in.size;
    return Connected{*std::move(local), "memory of this process", NodesOf(in.size, local_size)};
  }
  // Before the ranks connect: a rank that dies later is named by its connections at once, and one
  // that others wait for in the store only by the deadline.
  absl::StatusOr<Nodes> nodes =
      LocateRanks(options, {"node", {in.rank, in.size}, *store, prefix, deadline});
  if (!nodes.ok()) return nodes.status();
  absl::StatusOr<Transport> gloo =
      ConnectGloo({.rank = in.rank,
                   .size = in.size,
                   .store = store,
                   .prefix = prefix,
                   .interface = std::string(TextOf(in.interface_name)),
                   .rendezvous_host = std::string(TextOf(in.rendezvous_host)),
                   .deadline = deadline,
                   .key_file = std::string(TextOf(in.key_file)),
                   .digest = Digest(in.size, options)});
  if (!gloo.ok()) return gloo.status();
  Connected connected{*std::move(gloo), "", *std::move(nodes)};
  absl::StatusOr<std::string> words =
      ChooseDataPlane({.kind = options.transport,
                       .members = {in.rank, in.size},
                       .store = store,
                       .prefix = prefix,
                       .deadline = deadline,
                       .device = device,
                       .host_memory = options.checksum,
                       .local_size = connected.nodes.local_size,
                       .ucx_library = std::string(TextOf(in.ucx_library)),
                       .nccl_library = std::string(TextOf(in.nccl_library))},
                      connected.transport);
  if (!words.ok()) return words.status();
  connected.words = *std::move(words);
  return connected;
}

tw_nodes NodesFound(const Nodes& nodes, const ChosenTopology& topology) {
  if (!topology.rates.has_value()) return {};
  return {static_cast<size_t>(nodes.local_size), topology.rates->inside, topology.rates->between};
}

}  // namespace

absl::StatusOr<std::unique_ptr<tw_comm>> MakeCommunicator(const tw_options& in) {
  if (absl::Status bad = CheckWorld(in); !bad.ok()) return bad;
  absl::StatusOr<Options> options = ParseOptions(in);
  if (!options.ok()) return options.status();
  absl::StatusOr<std::shared_ptr<Device>> device = DeviceOf(in);
  if (!device.ok()) return device.status();
  Connected connected{Transport(), "one rank", Nodes()};
  ChosenTopology topology{*options, "one rank"};
  if (in.size > 1) {
    absl::StatusOr<Connected> made = Connect(in, *options, *device);
    if (!made.ok()) return made.status();
    connected = *std::move(made);
    absl::StatusOr<ChosenTopology> chosen = ChooseTopology(
        *options, connected.nodes, *connected.transport.data, Clock::now() + options->timeout);
    if (!chosen.ok()) return chosen.status();
    topology = *std::move(chosen);
  }
  absl::StatusOr<std::unique_ptr<Engine>> engine =
      Engine::Create(topology.options, std::move(connected.transport), *device);
  if (!engine.ok()) return engine.status();
  return std::make_unique<tw_comm>(tw_comm{in.rank,
                                           in.size,
                                           *device != nullptr,
                                           connected.words,
                                           topology.words,
                                           NodesFound(connected.nodes, topology),
                                           *std::move(engine),
                                           {}});
}

}  // namespace thinwire
