// Data bytes from a peer.
#include <algorithm>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/types.h"
#include "tests/fuzz/target.h"
#include "transport/gloo/gloo_links.h"

namespace thinwire::fuzz {
namespace {

// Whatever a frame holds, its parcels lie within it, one after the other, and reading ends.
void ReadsWithinItsFrame(Bytes frame) {
  Bytes rest = frame;
  for (;;) {
    const uint8_t* const before = rest.data();
    const absl::StatusOr<std::optional<Parcel>> parcel = ReadParcel(rest);
    if (!parcel.ok()) return Require(absl::IsDataLoss(parcel.status()), "damage is DataLoss");
    if (!parcel->has_value()) return;
    const Bytes block = (*parcel)->block;
    Require(block.data() == before + ParcelBytes(0), "a block is behind its header");
    Require(rest.data() == block.data() + block.size(), "the next one is behind the block");
    Require(rest.data() + rest.size() == frame.data() + frame.size(),
            "the frame ends where it did");
  }
}

// Parcels that are written can be read back from a frame with zeros after them.
void Parcels(Input& input) {
  constexpr size_t kFrame = 512;
  std::vector<uint8_t> frame(kFrame);
  std::vector<Parcel> written;
  MutableBytes room(frame);
  const uint32_t count = input.Below(9);
  while (written.size() < count) {
    const uint64_t slot = input.Take<uint64_t>() | 1;
    const Parcel parcel{slot, input.TakeBytes(input.Below(200))};
    if (ParcelBytes(parcel.block.size()) > room.size()) break;
    WriteParcel(parcel, room);
    written.push_back(parcel);
  }
  Bytes rest(frame);
  for (const Parcel& parcel : written) {
    const absl::StatusOr<std::optional<Parcel>> read = ReadParcel(rest);
    Require(read.ok() && read->has_value() && (*read)->slot == parcel.slot &&
                std::equal((*read)->block.begin(), (*read)->block.end(), parcel.block.begin(),
                           parcel.block.end()),
            "what was written is read");
  }
  const absl::StatusOr<std::optional<Parcel>> end = ReadParcel(rest);
  Require(end.ok() && !end->has_value(), "nothing is read behind the last one");
  ReadsWithinItsFrame(Bytes(frame).first(input.Below(kFrame + 1)));  // its last parcel cut off
  if (!written.empty()) {
    const uint32_t bit = input.Below(static_cast<uint32_t>(8 * ParcelBytes(0)));
    frame[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    rest = frame;
    Require(absl::IsDataLoss(ReadParcel(rest).status()), "a damaged header is not taken for one");
  }
  // Damages arbitrary bytes.
  for (int i = 0; i < 4; ++i) frame[input.Below(kFrame)] ^= input.Take<uint8_t>();
  ReadsWithinItsFrame(frame);
  ReadsWithinItsFrame(input.Rest());
}

}  // namespace

const std::vector<Target> kTransportTargets = {{"parcels", Parcels}};

}  // namespace thinwire::fuzz
