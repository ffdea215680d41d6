#include "transport/nccl/nccl_choice.h"

#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace thinwire {
namespace {

// NCCL's own setting, from 2.30 on: several ranks may have one GPU. An older NCCL refuses them.
constexpr char kSharingSetting[] = "NCCL_MULTI_RANK_GPU_ENABLE";

bool MaySharePerSetting() {
  const char* const value = std::getenv(kSharingSetting);
  return value != nullptr && std::string(value) == "1";
}

// What a rank has: the version, and its device, which is taken for its own where it may be shared.
absl::StatusOr<std::string> Offer(const NcclOptions& options,
                                  const absl::StatusOr<std::string>& version) {
  if (options.device == nullptr) {
    return absl::UnimplementedError(
        "its tensors lie in host memory; set the device, or transport to gloo");
  }
  if (!version.ok()) return version.status();
  const absl::StatusOr<std::string> identity = options.device->identity();
  if (!identity.ok()) return absl::UnimplementedError(identity.status().message());
  if (!MaySharePerSetting()) return absl::StrCat(*version, " ", *identity);
  return absl::StrCat(*version, " ", *identity, " shared by rank ", options.members.rank);
}

// OK if all ranks go together. A function of what all ranks know, so that all decide alike.
absl::Status CheckOffers(const Board& board, const Answers& offers) {
  if (absl::Status refusal = FirstRefusal(board, offers); !refusal.ok()) return refusal;
  std::map<std::string, size_t> owners;
  std::pair<std::string, std::string> first;  // version, device
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    const std::pair<std::string, std::string> mine =
        absl::StrSplit(*offers[rank], absl::MaxSplits(' ', 1));
    if (rank == 0) first = mine;
    if (mine.first != first.first) {
      return absl::UnimplementedError(absl::StrCat(
          "NCCL's ranks need one version, expected ", first.first, " as on rank 0, but rank ", rank,
          " has ", mine.first, "; install one on all of them, or set transport to gloo"));
    }
    const auto [owner, is_new] = owners.emplace(mine.second, rank);
    if (is_new) continue;
    return absl::UnimplementedError(absl::StrCat("NCCL's ranks need GPUs of their own, but ranks ",
                                                 owner->second, " and ", rank, " share one (",
                                                 mine.second,
                                                 "); give each its own, as by torch's local rank, "
                                                 "set transport to gloo, or, for tests, ",
                                                 kSharingSetting, "=1 with NCCL 2.30 or newer"));
  }
  return absl::OkStatus();
}

// NCCL tells nobody that another rank was refused, so ranks that wait for it in vain keep half of
// the time for hearing the reason.
NcclOptions WithHalfTheTime(NcclOptions options) {
  options.deadline -= (options.deadline - Clock::now()) / 2;
  return options;
}

}  // namespace

absl::StatusOr<ChosenPlane> ChooseNccl(const NcclOptions& options) {
  const Board board = BoardOf(options);
  const absl::StatusOr<std::string> version =
      options.device == nullptr ? std::string() : NcclVersion(options.library);
  const absl::StatusOr<Answers> offers = TellAll(board, "offer", Offer(options, version));
  if (!offers.ok()) return offers.status();
  if (absl::Status refusal = CheckOffers(board, *offers); !refusal.ok()) return refusal;

  absl::StatusOr<std::unique_ptr<DataPlane>> plane = ConnectNccl(WithHalfTheTime(options));
  // Who only waited for others has no reason of its own.
  const bool late = absl::IsDeadlineExceeded(plane.status()) && CanTell(board);
  const absl::Status reason = late ? absl::OkStatus() : plane.status();
  if (absl::Status bad = TellOutcome(board, "reason", reason); !bad.ok()) return bad;
  if (absl::Status bad = TellOutcome(board, "outcome", plane.status()); !bad.ok()) return bad;
  const char* const how = (*plane)->traits().allocates ? "" : ", memory not registered";
  return ChosenPlane{*std::move(plane), absl::StrCat("nccl ", *version, how)};
}

}  // namespace thinwire
