#include "integrations/c/communicator.h"

#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "integrations/c/callback_store.h"
#include "integrations/c/local_hub.h"
#include "integrations/c/options.h"
#include "integrations/c/text.h"
#include "kernels/device.h"
#include "schedule/engine/checks.h"
#include "schedule/engine/give_up.h"
#include "schedule/engine/handshake.h"
#include "schedule/engine/loops.h"
#include "schedule/engine/topology.h"
#include "schedule/order/frames.h"
#include "transport/choice.h"
#include "transport/failure_link.h"
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

// What a group is made of: its planes, what its data runs on, in words, where its ranks are, and
// which way its allreduces go.
struct Parts {
  Transport transport;
  std::string words;
  Nodes nodes;
  ChosenTopology topology;
};

// As the user says, else as the ranks find it if somebody wants to know.
absl::StatusOr<Nodes> LocateRanks(const Options& options, const Board& board) {
  const int world = board.members.size;
  if (options.local_size != 0) return NodesOf(world, options.local_size);
  const bool wanted = AsksForNodes(options, world) || options.transport == TransportKind::kAuto;
  return wanted ? FindNodes(board) : NodesOf(world, 1);
}

// What ranks that Gloo has connected agree on.
absl::Status Agree(const tw_options& in, const Options& options,
                   const std::shared_ptr<Device>& device, Deadline deadline, Parts& parts) {
  absl::StatusOr<Nodes> nodes =
      LocateRanks(options, {"node", {in.rank, in.size}, parts.transport, 0, deadline});
  if (!nodes.ok()) return nodes.status();
  parts.nodes = *std::move(nodes);
  absl::StatusOr<std::string> words =
      ChooseDataPlane({.kind = options.transport,
                       .deadline = deadline,
                       .device = device,
                       .host_memory = options.checksum,
                       .local_size = parts.nodes.local_size,
                       .loops = options.loops,
                       .ucx_library = std::string(TextOf(in.ucx_library)),
                       .nccl_library = std::string(TextOf(in.nccl_library))},
                      parts.transport);
  if (!words.ok()) return words.status();
  parts.words = *std::move(words);
  return absl::OkStatus();
}

absl::Status FindWay(const Options& options, Deadline deadline, Parts& parts) {
  const FailureLink hears_of_lost_peers(*parts.transport.control, *parts.transport.data);
  absl::StatusOr<ChosenTopology> chosen =
      ChooseTopology(options, parts.nodes, parts.transport, deadline);
  if (!chosen.ok()) return chosen.status();
  parts.topology = *std::move(chosen);
  return absl::OkStatus();
}

// More connections of the same ranks.
ConnectLoop LoopsOf(const GlooOptions& first) {
  return [first](std::shared_ptr<Store> store, const std::string& name, Deadline deadline) {
    GlooOptions options = first;
    options.store = std::move(store);
    absl::StrAppend(&options.prefix, name, "/");
    options.deadline = deadline;
    options.last_words = nullptr;  // the first connections tell why
    return ConnectGloo(options);
  };
}

absl::StatusOr<Parts> Connect(const tw_options& in, const Options& options,
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
  const GlooOptions gloo = {.rank = in.rank,
                            .size = in.size,
                            .store = store,
                            .prefix = prefix,
                            .interface = std::string(TextOf(in.interface_name)),
                            .rendezvous_host = std::string(TextOf(in.rendezvous_host)),
                            .deadline = deadline,
                            .key_file = std::string(TextOf(in.key_file)),
                            .digest = Digest(in.size, options),
                            .congestion = std::string(TextOf(in.congestion)),
                            .last_words = [](const absl::Status& why) { return PackFailure(why); }};
  absl::StatusOr<Transport> transport =
      meeting->hub != nullptr ? meeting->hub->Connect(in.rank) : ConnectGloo(gloo);
  if (!transport.ok()) return transport.status();
  Parts parts;
  parts.transport = *std::move(transport);
  absl::Status status;
  if (meeting->hub != nullptr) {
    parts.words = "memory of this process";
    parts.nodes = NodesOf(in.size, options.local_size != 0 ? options.local_size : in.size);
  } else {
    status =
        AddLoops(options.loops, store, LoopsOf(gloo), deadline, options.timeout, parts.transport);
    if (status.ok()) status = Agree(in, options, device, deadline, parts);
  }
  if (status.ok()) status = FindWay(options, deadline, parts);
  if (!status.ok()) return GiveUp(parts.transport, status);
  return parts;
}

tw_nodes NodesFound(const Parts& parts) {
  const std::optional<LinkRates>& rates = parts.topology.rates;
  if (!rates.has_value()) return {};
  return {static_cast<size_t>(parts.nodes.local_size), rates->inside, rates->between};
}

}  // namespace

absl::StatusOr<std::unique_ptr<tw_comm>> MakeCommunicator(const tw_options& in) {
  if (absl::Status bad = CheckWorld(in); !bad.ok()) return bad;
  absl::StatusOr<Options> options = ParseOptions(in);
  if (!options.ok()) return options.status();
  if (absl::Status bad = CheckOptions(*options); !bad.ok()) return bad;
  absl::StatusOr<std::shared_ptr<Device>> device = DeviceOf(in);
  if (!device.ok()) return device.status();
  absl::StatusOr<Parts> parts =
      in.size > 1 ? Connect(in, *options, *device)
                  : Parts{Transport(), "one rank", Nodes(), {*options, "one rank"}};
  if (!parts.ok()) return parts.status();
  absl::StatusOr<std::unique_ptr<Engine>> engine =
      Engine::Create(parts->topology.options, std::move(parts->transport), *device);
  if (!engine.ok()) return engine.status();
  return std::make_unique<tw_comm>(tw_comm{in.rank,
                                           in.size,
                                           *device != nullptr,
                                           parts->words,
                                           parts->topology.words,
                                           NodesFound(*parts),
                                           *std::move(engine),
                                           {}});
}

}  // namespace thinwire
