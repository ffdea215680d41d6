#include "schedule/join/planes.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "schedule/join/agree.h"
#include "schedule/join/links.h"
#include "transport/combined/combined.h"
#include "transport/nccl/nccl.h"
#include "transport/ucx/ucx.h"

namespace thinwire {

std::string HostIdentity() {
  std::string identity = NodeIdentity();
  for (const char* name : {"ipc", "mnt", "pid", "user"}) {
    std::error_code unknown;
    const std::string path = absl::StrCat("/proc/self/ns/", name);
    absl::StrAppend(&identity, " ", std::filesystem::read_symlink(path, unknown).string());
  }
  struct stat folder {};
  stat("/dev/shm", &folder);
  return absl::StrCat(identity, " shm:", folder.st_dev, ":", folder.st_ino, " uid:", geteuid());
}

namespace {

using DataPlanePtr = std::unique_ptr<DataPlane>;

// A data plane that all ranks of a group have agreed on.
struct ChosenPlane {
  DataPlanePtr data;  // null: the transport's own
  std::string words;  // in words, such as "ucx 1.13.1 over shared memory"
};

// The steps that differ between NCCL and UCX.
struct Library {
  absl::StatusOr<std::string> offer;  // what this rank has, or why it can't take part
  // OK if the offers match. A function of what all ranks know.
  absl::Status (*check)(const Board& board, const Answers& offers);
  std::function<absl::StatusOr<DataPlanePtr>(const Answers& offers, TellAddress tell,
                                             Deadline deadline)>
      connect;
};

absl::StatusOr<DataPlanePtr> Establish(const Board& board, const Library& library) {
  const absl::StatusOr<Answers> offers = TellAll(board, "offer", library.offer);
  if (!offers.ok()) return offers.status();
  if (absl::Status refusal = FirstRefusal(board, *offers); !refusal.ok()) return refusal;
  if (absl::Status refusal = library.check(board, *offers); !refusal.ok()) return refusal;
  // The library does not report that another rank was refused, so connecting gets half of the time,
  // and the other half is for receiving the reason.
  const Deadline half = board.deadline - (board.deadline - Clock::now()) / 2;
  absl::StatusOr<DataPlanePtr> plane = library.connect(*offers, TellerOf(board), half);
  // A rank that only waited for others has no reason to tell.
  const bool late = absl::IsDeadlineExceeded(plane.status()) && CanTell(board);
  const absl::Status reason = late ? absl::OkStatus() : plane.status();
  if (absl::Status bad = TellOutcome(board, "reason", reason); !bad.ok()) return bad;
  if (absl::Status bad = TellOutcome(board, "outcome", plane.status()); !bad.ok()) return bad;
  return plane;
}

// NCCL's own setting, from 2.30 on: several ranks may have one GPU. An older NCCL refuses them.
constexpr char kSharingSetting[] = "NCCL_MULTI_RANK_GPU_ENABLE";

bool MaySharePerSetting() {
  const char* const value = std::getenv(kSharingSetting);
  return value != nullptr && std::string(value) == "1";
}

// CTAs of NCCL's kernels, which occupy the GPU while they wait for a network; a few can fill it
// (decision 2). Inside one node NCCL's default is better.
constexpr int kCtasBetweenNodes = 4;

// The version, the node, and the device; if GPUs may be shared, with the rank, so that they differ.
absl::StatusOr<std::string> NcclOffer(const ChoiceOptions& options,
                                      const absl::StatusOr<std::string>& version, int rank) {
  if (options.device == nullptr) {
    return absl::UnimplementedError(
        "its tensors lie in host memory; set the device, or transport to gloo");
  }
  if (!version.ok()) return version.status();
  const absl::StatusOr<std::string> identity = options.device->identity();
  if (!identity.ok()) return absl::UnimplementedError(identity.status().message());
  const std::string node = options.node.empty() ? NodeIdentity() : options.node;
  const std::string owner = MaySharePerSetting() ? absl::StrCat(" shared by rank ", rank) : "";
  return absl::StrCat(*version, "\n", node, "\n", *identity, owner);
}

struct NcclParts {
  std::string version, node, device;
};

NcclParts PartsOf(const std::string& offer) {
  const std::vector<std::string> parts = absl::StrSplit(offer, absl::MaxSplits('\n', 2));
  return {parts[0], parts.size() > 1 ? parts[1] : "", parts.size() > 2 ? parts[2] : ""};
}

bool AreOneNode(const Answers& offers) {
  const std::string first = PartsOf(*offers[0]).node;
  return std::all_of(offers.begin(), offers.end(),
                     [&](const auto& offer) { return PartsOf(*offer).node == first; });
}

absl::Status CheckNcclOffers(const Board&, const Answers& offers) {
  std::map<std::string, size_t> owners;
  const NcclParts first = PartsOf(*offers[0]);
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    const NcclParts mine = PartsOf(*offers[rank]);
    if (mine.version != first.version) {
      return absl::UnimplementedError(absl::StrCat(
          "NCCL's ranks need one version, expected ", first.version, " as on rank 0, but rank ",
          rank, " has ", mine.version, "; install one on all of them, or set transport to gloo"));
    }
    const auto [owner, is_new] = owners.emplace(mine.device, rank);
    if (is_new) continue;
    return absl::UnimplementedError(absl::StrCat("NCCL's ranks need GPUs of their own, but ranks ",
                                                 owner->second, " and ", rank, " share one (",
                                                 mine.device,
                                                 "); give each its own, as by torch's local rank, "
                                                 "set transport to gloo, or, for tests, ",
                                                 kSharingSetting, "=1 with NCCL 2.30 or newer"));
  }
  return absl::OkStatus();
}

absl::StatusOr<ChosenPlane> TryNccl(const ChoiceOptions& options, Transport& transport) {
  if (options.host_memory) {
    return absl::UnimplementedError(
        "checksum is on, and NCCL moves a device's memory, which no processor sees; set transport "
        "to gloo, or checksum off");
  }
  const Membership& members = transport.members();
  const absl::StatusOr<std::string> version =
      options.device == nullptr ? std::string() : NcclVersion(options.nccl_library);
  const auto connect = [&](const Answers& offers, TellAddress tell, Deadline deadline) {
    return ConnectNccl({.members = members,
                        .tell = std::move(tell),
                        .control = *transport.control,
                        .library = options.nccl_library,
                        .deadline = deadline,
                        .device = options.device,
                        .most_ctas = AreOneNode(offers) ? kNcclDefault : kCtasBetweenNodes});
  };
  absl::StatusOr<DataPlanePtr> plane =
      Establish({"NCCL", members, transport, 0, options.deadline, options.timeout},
                {NcclOffer(options, version, members.rank), CheckNcclOffers, connect});
  if (!plane.ok()) return plane.status();
  const char* const how = (*plane)->traits().allocates ? "" : ", memory not registered";
  return ChosenPlane{*std::move(plane), absl::StrCat("nccl ", *version, how)};
}

// Ranks with the same version that can share memory give the same offer.
absl::Status CheckUcxOffers(const Board& board, const Answers& offers) {
  for (size_t rank = 1; rank < offers.size(); ++rank) {
    if (*offers[rank] == *offers[0]) continue;
    return absl::UnimplementedError(
        absl::StrCat("UCX is for ranks that share one host's memory, with the same version, user "
                     "and namespaces, "
                     "expected ",
                     *offers[0], " as on rank ", board.first, ", but rank ", board.first + rank,
                     " has ", *offers[rank], "; set transport to gloo, or to auto"));
  }
  return absl::OkStatus();
}

// Among ranks [first, first + size).
absl::StatusOr<ChosenPlane> TryUcx(const ChoiceOptions& options, Transport& transport, int first,
                                   int size) {
  const Membership members{transport.members().rank - first, size};
  const absl::StatusOr<std::string> version = UcxVersion(options.ucx_library);
  const auto connect = [&](const Answers&, TellAddress tell, Deadline deadline) {
    return ConnectUcx({.members = members,
                       .tell = std::move(tell),
                       .control = *transport.control,
                       .first = first,
                       .library = options.ucx_library,
                       .deadline = deadline});
  };
  absl::StatusOr<std::string> offer = version;
  if (offer.ok()) absl::StrAppend(&*offer, " ", HostIdentity());
  absl::StatusOr<DataPlanePtr> plane =
      Establish({"UCX", members, transport, first, options.deadline, options.timeout},
                {std::move(offer), CheckUcxOffers, connect});
  if (!plane.ok()) return plane.status();
  return ChosenPlane{*std::move(plane), absl::StrCat("ucx ", *version, " over shared memory")};
}

absl::StatusOr<ChosenPlane> TryUcx(const ChoiceOptions& options, Transport& transport) {
  return TryUcx(options, transport, 0, transport.members().size);
}

// UCX's plane inside every node; Unimplemented on all ranks if one of the nodes can't use it.
absl::StatusOr<ChosenPlane> TryUcxInside(const ChoiceOptions& options, Transport& transport) {
  if (options.local_size < 2)
    return absl::UnimplementedError("there are no nodes of several ranks");
  const Membership& members = transport.members();
  absl::StatusOr<ChosenPlane> chosen = TryUcx(
      options, transport, members.rank - members.rank % options.local_size, options.local_size);
  const Board board{"UCX inside nodes", members, transport, 0, options.deadline, options.timeout};
  if (absl::Status bad = TellOutcome(board, "outcome", chosen.status()); !bad.ok()) return bad;
  return chosen;
}

ChosenPlane Gloo(const ChoiceOptions& options) {
  if (options.loops == 1) return {nullptr, "gloo over TCP"};
  return {nullptr, absl::StrCat("gloo over TCP, ", options.loops, " loops")};
}

absl::StatusOr<ChosenPlane> TryAll(const ChoiceOptions& options, Transport& transport) {
  absl::StatusOr<ChosenPlane> chosen = TryNccl(options, transport);
  if (absl::IsUnimplemented(chosen.status())) chosen = TryUcx(options, transport);
  if (absl::IsUnimplemented(chosen.status())) chosen = TryUcxInside(options, transport);
  if (absl::IsUnimplemented(chosen.status())) return Gloo(options);
  return chosen;
}

absl::StatusOr<ChosenPlane> Try(const ChoiceOptions& options, Transport& transport) {
  switch (options.kind) {
    case TransportKind::kGloo: break;
    case TransportKind::kUcx: return TryUcx(options, transport);
    case TransportKind::kNccl: return TryNccl(options, transport);
    case TransportKind::kAuto: return TryAll(options, transport);
  }
  return Gloo(options);
}

}  // namespace

absl::StatusOr<std::string> ChooseDataPlane(const ChoiceOptions& options, Transport& transport) {
  absl::StatusOr<ChosenPlane> chosen = Try(options, transport);
  if (!chosen.ok()) return chosen.status();
  if (chosen->data != nullptr && chosen->data->size() == transport.members().size) {
    transport.data = std::move(chosen->data);
    return std::move(chosen->words);
  }
  if (options.connect_loops) {
    if (absl::Status bad = options.connect_loops(); !bad.ok()) return bad;
  }
  if (chosen->data == nullptr) return std::move(chosen->words);
  transport.data = std::make_unique<Split>(std::move(chosen->data), std::move(transport.data));
  return absl::StrCat(chosen->words, " inside nodes, ", Gloo(options).words, " between them");
}

}  // namespace thinwire
