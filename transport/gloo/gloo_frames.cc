#include "transport/gloo/gloo_frames.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/checked/crc32c.h"
#include "transport/gloo/gloo_pair.h"

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

GlooFrames::GlooFrames(gloo::Context& context, int peer, uint64_t slot, size_t bytes, size_t count)
    : peer_(peer),
      slot_(slot),
      bytes_(bytes),
      count_(count),
      in_(bytes * count),
      out_(bytes * count),
      receiver_(context.createUnboundBuffer(in_.data(), in_.size())),
      sender_(context.createUnboundBuffer(out_.data(), out_.size())) {}

void GlooFrames::Refill() {
  while (started_ - taken_ < count_) {
    const size_t offset = started_++ % count_ * bytes_;
    receiver_->recv(peer_, slot_, offset, bytes_);
  }
}

MutableBytes GlooFrames::next() { return Frame(out_, sent_); }

void GlooFrames::Send(size_t bytes, std::vector<BlockOwner*> owners) {
  owners_.push_back(std::move(owners));
  const size_t offset = sent_++ % count_ * bytes_;
  sender_->send(peer_, slot_, offset, bytes);  // Gloo takes less than its receive has room for
}

bool GlooFrames::Collect(const std::function<void(Bytes)>& take) {
  for (size_t came = TakeReceived(*receiver_); came > 0; --came) {
    const MutableBytes frame = Frame(in_, taken_++);
    take(frame);
    std::fill(frame.begin(), frame.end(), uint8_t{0});  // the next one may be shorter
  }
  const size_t left = TakeSent(*sender_);
  for (size_t i = 0; i < left && !owners_.empty(); ++i) {
    const std::vector<BlockOwner*> owners = std::move(owners_.front());
    owners_.pop_front();
    for (BlockOwner* const owner : owners) owner->OnBlockEnded(absl::OkStatus());
  }
  return left > 0;
}

std::vector<BlockOwner*> GlooFrames::ForgetOwners() {
  std::vector<BlockOwner*> all;
  for (std::vector<BlockOwner*>& owners : owners_) {
    all.insert(all.end(), owners.begin(), owners.end());
    owners.clear();
  }
  return all;
}

}  // namespace thinwire
