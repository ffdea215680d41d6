#include "transport/gloo/gloo_parcels.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/checked/crc32c.h"

namespace thinwire {
namespace {

// A frame is parcels one after another, and then, where there is room, zeros. A header that came
// damaged would be a block that never meets its match, so it has a sum; the block may have one of
// its own (transport/checked).
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

struct FrameSize {
  size_t bytes, count;
};
// What is sent is always a whole frame: these hold a word, a block of 4 KiB, and the largest block.
constexpr FrameSize kFrameSizes[] = {{512, 8}, {4096 + 512, 8}, {GlooParcels::kLargest + 1024, 4}};

}  // namespace

GlooParcels::GlooParcels(GlooShared& shared, int peer) : shared_(shared), peer_(peer) {
  uint64_t slot = kGlooControlSlot;
  for (const auto [bytes, count] : kFrameSizes) {
    slot += 2;  // even slots are those of frames
    sizes_.push_back(std::make_unique<GlooFrames>(shared, peer, slot, bytes, count));
  }
  Post();
}

void GlooParcels::Post() {
  if (!std::exchange(posted_, true)) shared_.loop().Post(this);
}

void GlooParcels::Expect(uint64_t slot, MutableBytes to, BlockOwner* owner) {
  expected_.insert({slot, {to, owner}});
  if (const auto early = early_.extract(slot); !early.empty()) Deliver(slot, early.mapped());
}

// Those that other tasks of this turn of the loop send go with it.
void GlooParcels::Send(uint64_t slot, Bytes from, BlockOwner* owner) {
  queue_.push_back({slot, from, owner});
  Post();
}

void GlooParcels::Run() {
  posted_ = false;
  try {
    for (const auto& frames : sizes_) frames->Refill();
    Pack();
  } catch (const std::exception&) {
    return;  // the connection is closed, which its observer is told
  }
  Collect();  // what has left by now
}

void GlooParcels::Pack() {
  while (!queue_.empty()) {
    size_t bytes = 0, count = 0;
    for (const Queued& parcel : queue_) {
      const size_t with = bytes + sizeof(Header) + parcel.from.size();
      if (with > sizes_.back()->bytes()) break;
      bytes = with;
      ++count;
    }
    GlooFrames* const frames = FrameFor(bytes);
    if (frames == nullptr) return;
    uint8_t* at = frames->next().data();
    uint8_t* const end = at + frames->bytes();
    std::vector<BlockOwner*> owners;
    for (; count > 0; --count) {
      const Queued& parcel = queue_.front();
      const Header header = Header::Of(parcel.slot, parcel.from.size());
      std::memcpy(at, &header, sizeof(header));
      std::memcpy(at + sizeof(header), parcel.from.data(), parcel.from.size());
      at += sizeof(header) + parcel.from.size();
      owners.push_back(parcel.owner);
      queue_.pop_front();
    }
    std::memset(at, 0, std::min<size_t>(end - at, sizeof(Header)));
    frames->Send(std::move(owners));
  }
}

// The smallest that is large enough and free; null: none is.
GlooFrames* GlooParcels::FrameFor(size_t bytes) {
  for (const auto& frames : sizes_) {
    if (bytes <= frames->bytes() && frames->has_room()) return frames.get();
  }
  return nullptr;
}

void GlooParcels::Collect() {
  bool wanted = false;
  for (const auto& frames : sizes_) {
    const bool left = frames->Collect([this](Bytes frame) { Unpack(frame); });
    wanted = wanted || frames->low() || (left && !queue_.empty());
  }
  if (wanted) Post();
}

void GlooParcels::Unpack(Bytes frame) {
  while (frame.size() >= sizeof(Header)) {
    Header header;
    std::memcpy(&header, frame.data(), sizeof(header));
    if (header.is_end()) return;
    frame = frame.subspan(sizeof(header));
    if (header.sum != header.Sum() || header.bytes > frame.size()) {
      return shared_.Fail(absl::DataLossError(
          absl::StrCat("what rank ", peer_, " sent to rank ", shared_.members().rank,
                       " came damaged: a block of ", header.bytes, " bytes where ", frame.size(),
                       " are left; look for a fault of the memory and network of both machines and "
                       "of what is between")));
    }
    Deliver(header.slot, frame.first(header.bytes));
    frame = frame.subspan(header.bytes);
  }
}

// A block's size is part of its slot; one that is still wrong waits for its deadline like any other
// that never meets its match.
void GlooParcels::Deliver(uint64_t slot, Bytes block) {
  const auto found = expected_.find(slot);
  if (found == expected_.end() || found->second.to.size() != block.size()) {
    early_.insert({slot, {block.begin(), block.end()}});
    return;
  }
  const Expected expected = found->second;
  expected_.erase(found);
  std::memcpy(expected.to.data(), block.data(), block.size());
  expected.owner->OnBlockEnded();
}

void GlooParcels::ForgetAll() {
  expected_.clear();
  queue_.clear();
  early_.clear();
  for (const auto& frames : sizes_) frames->ForgetOwners();
}

}  // namespace thinwire
