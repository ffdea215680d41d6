#include "integrations/nccl_shim/nccl_agreement.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

constexpr size_t kRoom = 512;  // bytes that a rank says: a mark, text, zeros
constexpr char kTerms = '+', kRefusal = '-';

void Write(const absl::StatusOr<std::string>& terms, uint8_t* room) {
  const std::string text =
      terms.ok() ? kTerms + *terms : kRefusal + std::string(terms.status().message());
  std::memset(room, 0, kRoom);
  std::memcpy(room, text.data(), std::min(text.size(), kRoom - 1));
}

std::string_view TextIn(const uint8_t* room) { return reinterpret_cast<const char*>(room); }

// A function of what all ranks have said.
absl::Status Judge(const std::vector<std::string_view>& said) {
  for (size_t rank = 0; rank < said.size(); ++rank) {
    if (said[rank].starts_with(kTerms)) continue;
    const std::string why(said[rank].substr(std::min<size_t>(1, said[rank].size())));
    return absl::UnimplementedError(absl::StrCat("rank ", rank, " takes no part: ", why));
  }
  for (size_t rank = 1; rank < said.size(); ++rank) {
    if (said[rank] == said[0]) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " wants ", std::string(said[rank].substr(1)),
                     ", expected rank 0's ", std::string(said[0].substr(1)),
                     "; set THINWIRE_NCCL_CODEC and THINWIRE_NCCL_MIN_BYTES alike on all ranks"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status AgreeOver(StreamPlane& plane, Device& device, const absl::StatusOr<std::string>& terms,
                       Deadline deadline, AgreementRemains* remains) {
  const size_t size = plane.size(), bytes = size * kRoom;
  const absl::StatusOr<std::unique_ptr<DeviceStream>> stream = device.MakeStream();
  if (!stream.ok()) return stream.status();
  const absl::StatusOr<DeviceMemory> rooms = device.Allocate(bytes);
  if (!rooms.ok()) return rooms.status();
  remains->rooms = *rooms;
  const absl::StatusOr<DeviceMemory> host = device.AllocatePinned(bytes);
  if (!host.ok()) return host.status();
  remains->host = *host;

  const size_t own = plane.rank() * kRoom;
  Write(terms, host->get() + own);
  (*stream)->Copy(rooms->get() + own, host->get() + own, kRoom);
  std::vector<MutableBytes> recv;
  for (size_t r = 0; r < size; ++r) recv.push_back({rooms->get() + r * kRoom, kRoom});
  const std::vector<Bytes> send(size, recv[plane.rank()]);
  const std::unique_ptr<StreamPlane> ours = plane.On(**stream);
  if (absl::Status bad = ours->Start(0, send, recv)->Wait(deadline); !bad.ok()) return bad;
  (*stream)->Copy(host->get(), rooms->get(), bytes);
  if (absl::Status bad = ours->Flush()->Wait(deadline); !bad.ok()) return bad;

  std::vector<std::string_view> said;
  for (size_t r = 0; r < size; ++r) said.push_back(TextIn(host->get() + r * kRoom));
  return Judge(said);
}

}  // namespace thinwire
