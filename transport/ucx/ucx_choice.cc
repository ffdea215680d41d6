#include "transport/ucx/ucx_choice.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/ucx/one_host.h"

namespace thinwire {
namespace {

// Ranks that can share memory with the same version give the same answer.
absl::StatusOr<std::string> Offer(const std::string& version) {
  return absl::StrCat(version, " ", HostIdentity());
}

// OK if all ranks can share memory. A function of what all ranks know, so that all decide alike.
absl::Status CheckOffers(const Board& board, const Answers& offers) {
  if (absl::Status refusal = FirstRefusal(board, offers); !refusal.ok()) return refusal;
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

}  // namespace

absl::StatusOr<ChosenPlane> ChooseUcx(const UcxOptions& options) {
  const Board board = BoardOf(options);
  const absl::StatusOr<std::string> version = UcxVersion(options.library);
  const absl::StatusOr<Answers> offers =
      TellAll(board, "offer", version.ok() ? Offer(*version) : version);
  if (!offers.ok()) return offers.status();
  if (absl::Status refusal = CheckOffers(board, *offers); !refusal.ok()) return refusal;
  absl::StatusOr<std::unique_ptr<DataPlane>> plane = ConnectUcx(options);
  if (absl::Status bad = TellOutcome(board, "outcome", plane.status()); !bad.ok()) return bad;
  return ChosenPlane{*std::move(plane), absl::StrCat("ucx ", *version, " over shared memory")};
}

}  // namespace thinwire
