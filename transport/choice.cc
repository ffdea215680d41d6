#include "transport/choice.h"

#include <utility>

#include "transport/nccl/nccl_choice.h"
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

absl::StatusOr<ChosenPlane> TryAll(const ChoiceOptions& options) {
  absl::StatusOr<ChosenPlane> chosen = TryNccl(options);
  if (absl::IsUnimplemented(chosen.status())) chosen = TryUcx(options);
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
  if (chosen->data != nullptr) transport.data = std::move(chosen->data);
  return std::move(chosen->words);
}

}  // namespace thinwire
