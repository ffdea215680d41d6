// The bytes of a frame of parcels: small blocks one after another, each behind a header, and where
// there is room behind the last one, zeros of a header's size. No Gloo here.
#ifndef THINWIRE_TRANSPORT_GLOO_PARCEL_FRAME_H_
#define THINWIRE_TRANSPORT_GLOO_PARCEL_FRAME_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "compress/types.h"

namespace thinwire {

struct Parcel {
  uint64_t slot = 0;  // not 0
  Bytes block;
};

// The bytes of a frame that a block of so many takes.
size_t ParcelBytes(size_t block);

// Puts a parcel in front of `rest`, which has room for it, and leaves what is behind it.
void WriteParcel(const Parcel& parcel, MutableBytes& rest);

// Says that nothing comes behind; `rest` is what the parcels have left of the frame.
void EndParcels(MutableBytes rest);

// Takes the parcel in front of `rest`, of a frame that came; null: there is none any more. Its
// block lies within the frame. DataLoss, which says what is wrong, for bytes that nobody has
// written so.
absl::StatusOr<std::optional<Parcel>> ReadParcel(Bytes& rest);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_PARCEL_FRAME_H_
