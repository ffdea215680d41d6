#include "transport/gloo/parcel_frame.h"

#include <algorithm>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "transport/checked/crc32c.h"

namespace thinwire {
namespace {

// A header that came damaged would be a block that never meets its match, so it has a sum; the
// block may have one of its own (transport/checked).
struct Header {
  uint64_t slot = 0;
  uint32_t bytes = 0;
  uint32_t sum = 0;  // of all before

  static Header Of(uint64_t slot, size_t bytes) {
    Header header{slot, static_cast<uint32_t>(bytes)};
    header.sum = header.Sum();
    return header;
  }
  uint32_t Sum() const {
    uint8_t bytes_of[sizeof(Header)];
    std::memcpy(bytes_of, this, sizeof(Header));
    return Crc32c(0, Bytes(bytes_of).first(offsetof(Header, sum)));
  }
  bool is_end() const { return slot == 0 && bytes == 0 && sum == 0; }
};
static_assert(sizeof(Header) == 16);

}  // namespace

size_t ParcelBytes(size_t block) { return sizeof(Header) + block; }

void WriteParcel(const Parcel& parcel, MutableBytes& rest) {
  const Header header = Header::Of(parcel.slot, parcel.block.size());
  std::memcpy(rest.data(), &header, sizeof(header));
  std::copy(parcel.block.begin(), parcel.block.end(), rest.data() + sizeof(header));
  rest = rest.subspan(ParcelBytes(parcel.block.size()));
}

void EndParcels(MutableBytes rest) {
  std::fill_n(rest.data(), std::min(rest.size(), sizeof(Header)), uint8_t{0});
}

absl::StatusOr<std::optional<Parcel>> ReadParcel(Bytes& rest) {
  Header header;
  if (rest.size() < sizeof(header)) return std::nullopt;
  std::memcpy(&header, rest.data(), sizeof(header));
  if (header.is_end()) return std::nullopt;
  rest = rest.subspan(sizeof(header));
  if (header.sum != header.Sum() || header.bytes > rest.size()) {
    return absl::DataLossError(
        absl::StrCat("a block of ", header.bytes, " bytes where ", rest.size(), " are left"));
  }
  const Parcel parcel{header.slot, rest.first(header.bytes)};
  rest = rest.subspan(header.bytes);
  return parcel;
}

}  // namespace thinwire
