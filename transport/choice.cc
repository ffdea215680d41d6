#include "transport/choice.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/nccl/nccl_choice.h"
#include "transport/split/split.h"
#include "transport/ucx/ucx_choice.h"

namespace thinwire {
namespace {

constexpr char kGlooRuns[] = "gloo over TCP";

absl::StatusOr<ChosenPlane> TryNccl(const ChoiceOptions& options) {
  if (options.host_memory) {
    return absl::UnimplementedError(
        "checksum is on, and NCCL moves a device's memory, which no processor sees; set transport "
        "to gloo, or checksum off");
  }
  return ChooseNccl({.rank = options.members.rank,
                     .size = options.members.size,
                     .store = options.store,
                     .prefix = options.prefix,
                     .library = options.nccl_library,
                     .deadline = options.deadline,
                     .device = options.device});
}

absl::StatusOr<ChosenPlane> TryUcx(const ChoiceOptions& options) {
  return ChooseUcx({.rank = options.members.rank,
                    .size = options.members.size,
                    .store = options.store,
                    .prefix = options.prefix,
                    .library = options.ucx_library,
                    .deadline = options.deadline});
}

// UCX's plane inside every node; Unimplemented on all ranks if one of the nodes can't.
absl::StatusOr<ChosenPlane> TryUcxInside(const ChoiceOptions& options) {
  if (options.local_size < 2)
    return absl::UnimplementedError("there are no nodes of several ranks");
  const auto [rank, size] = options.members;
  ChoiceOptions inside = options;
  inside.members = {rank % options.local_size, options.local_size};
  inside.prefix = absl::StrCat(options.prefix, "node ", rank / options.local_size, "/");
  absl::StatusOr<ChosenPlane> chosen = TryUcx(inside);
  const Board board{"UCX inside nodes", options.members, *options.store, options.prefix,
                    options.deadline};
  const absl::StatusOr<Answers> outcomes =
      TellAll(board, "outcome", chosen.ok() ? absl::StatusOr<std::string>("") : chosen.status());
  if (!outcomes.ok()) return outcomes.status();
  if (absl::Status refusal = FirstRefusal(board, *outcomes); !refusal.ok()) return refusal;
  return chosen;
}

absl::StatusOr<ChosenPlane> TryAll(const ChoiceOptions& options) {
  absl::StatusOr<ChosenPlane> chosen = TryNccl(options);
  if (absl::IsUnimplemented(chosen.status())) chosen = TryUcx(options);
  if (absl::IsUnimplemented(chosen.status())) chosen = TryUcxInside(options);
  if (absl::IsUnimplemented(chosen.status())) return ChosenPlane{nullptr, kGlooRuns};
  return chosen;
}

absl::StatusOr<ChosenPlane> Try(const ChoiceOptions& options) {
  switch (options.kind) {
    case TransportKind::kGloo: break;
    case TransportKind::kUcx: return TryUcx(options);
    case TransportKind::kNccl: return TryNccl(options);
    case TransportKind::kAuto: return TryAll(options);
  }
  return ChosenPlane{nullptr, kGlooRuns};
}

}  // namespace

absl::StatusOr<std::string> ChooseDataPlane(const ChoiceOptions& options, Transport& transport) {
  absl::StatusOr<ChosenPlane> chosen = Try(options);
  if (!chosen.ok()) return chosen.status();
  if (chosen->data == nullptr) return std::move(chosen->words);
  if (chosen->data->size() == options.members.size) {
    transport.data = std::move(chosen->data);
    return std::move(chosen->words);
  }
  transport.data = std::make_unique<Split>(std::move(chosen->data), std::move(transport.data));
  return absl::StrCat(chosen->words, " inside nodes, ", kGlooRuns, " between them");
}

}  // namespace thinwire
