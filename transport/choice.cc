#include "transport/choice.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/nccl/nccl_choice.h"
#include "transport/split/split.h"
#include "transport/ucx/ucx_choice.h"

namespace thinwire {
namespace {

ChosenPlane Gloo(const ChoiceOptions& options) {
  if (options.loops == 1) return {nullptr, "gloo over TCP"};
  return {nullptr, absl::StrCat("gloo over TCP, ", options.loops, " loops")};
}

absl::StatusOr<ChosenPlane> TryNccl(const ChoiceOptions& options, Transport& transport) {
  if (options.host_memory) {
    return absl::UnimplementedError(
        "checksum is on, and NCCL moves a device's memory, which no processor sees; set transport "
        "to gloo, or checksum off");
  }
  return ChooseNccl({.members = transport.members(),
                     .transport = transport,
                     .library = options.nccl_library,
                     .deadline = options.deadline,
                     .device = options.device});
}

// Between `size` neighbours, of whom the first is rank `first`.
absl::StatusOr<ChosenPlane> TryUcx(const ChoiceOptions& options, Transport& transport, int first,
                                   int size) {
  return ChooseUcx({.members = {transport.members().rank - first, size},
                    .transport = transport,
                    .first = first,
                    .library = options.ucx_library,
                    .deadline = options.deadline});
}

absl::StatusOr<ChosenPlane> TryUcx(const ChoiceOptions& options, Transport& transport) {
  return TryUcx(options, transport, 0, transport.members().size);
}

// UCX's plane inside every node; Unimplemented on all ranks if one of the nodes can't.
absl::StatusOr<ChosenPlane> TryUcxInside(const ChoiceOptions& options, Transport& transport) {
  if (options.local_size < 2)
    return absl::UnimplementedError("there are no nodes of several ranks");
  const Membership& members = transport.members();
  absl::StatusOr<ChosenPlane> chosen = TryUcx(
      options, transport, members.rank - members.rank % options.local_size, options.local_size);
  const Board board{"UCX inside nodes", members, transport, 0, options.deadline};
  if (absl::Status bad = TellOutcome(board, "outcome", chosen.status()); !bad.ok()) return bad;
  return chosen;
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
  if (chosen->data == nullptr) return std::move(chosen->words);
  if (chosen->data->size() == transport.members().size) {
    transport.data = std::move(chosen->data);
    return std::move(chosen->words);
  }
  transport.data = std::make_unique<Split>(std::move(chosen->data), std::move(transport.data));
  return absl::StrCat(chosen->words, " inside nodes, ", Gloo(options).words, " between them");
}

}  // namespace thinwire
