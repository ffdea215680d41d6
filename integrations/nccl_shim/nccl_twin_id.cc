#include "integrations/nccl_shim/nccl_twin_id.h"

#include <algorithm>
#include <cstring>
#include <string_view>

namespace thinwire {
namespace {

// NCCL's own bytes come first: 8 of a random number, 28 of an address, from 2.29 on 4 of a count.
constexpr size_t kOwnBytes = 48;
constexpr std::string_view kMark = "thinwire";
constexpr size_t kMarkAt = kOwnBytes, kTwinAt = kMarkAt + kMark.size();
static_assert(kTwinAt + kOwnBytes <= sizeof(NcclUniqueId));

// True if NCCL has left the bytes of a 128-byte id that held `filler` free: those that it does not
// need are zeros, or, up to 2.18, as they were.
bool HasRoom(const NcclUniqueId& id, char filler) {
  const char *begin = id.bytes + kOwnBytes, *end = id.bytes + sizeof(id.bytes);
  return std::all_of(begin, end, [begin](char byte) { return byte == *begin; }) &&
         (*begin == 0 || *begin == filler);
}

}  // namespace

absl::Status AttachTwin(const NcclNext& nccl, NcclUniqueId* id) {
  constexpr char kFiller = 0x5a;
  NcclUniqueId twin;
  std::memset(twin.bytes, kFiller, sizeof(twin.bytes));
  if (nccl.get_unique_id(&twin) != kNcclOk) {
    return absl::UnimplementedError("NCCL gave no second unique id");
  }
  if (!HasRoom(twin, kFiller)) {
    return absl::UnimplementedError(
        "this version of NCCL has longer unique ids than those that are known, so that the ranks "
        "can't find each other; use NCCL 2.18 to 2.30");
  }
  if (std::memcmp(twin.bytes, id->bytes, kOwnBytes) == 0) {
    return absl::UnimplementedError(
        "NCCL gives the same unique id twice, so that the ranks can't find each other; unset "
        "NCCL_COMM_ID");
  }
  std::memcpy(id->bytes + kMarkAt, kMark.data(), kMark.size());
  std::memcpy(id->bytes + kTwinAt, twin.bytes, kOwnBytes);
  return absl::OkStatus();
}

std::optional<NcclUniqueId> TwinOf(const NcclUniqueId& id) {
  if (std::string_view(id.bytes + kMarkAt, kMark.size()) != kMark) return std::nullopt;
  NcclUniqueId twin = {};
  std::memcpy(twin.bytes, id.bytes + kTwinAt, kOwnBytes);
  return twin;
}

}  // namespace thinwire
