#include "transport/gloo/gloo_parcels.h"

#include <cstring>
#include <exception>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/gloo/parcel_frame.h"

namespace thinwire {
namespace {

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
      const size_t with = bytes + ParcelBytes(parcel.from.size());
      if (with > sizes_.back()->bytes()) break;
      bytes = with;
      ++count;
    }
    GlooFrames* const frames = FrameFor(bytes);
    if (frames == nullptr) return;
    MutableBytes rest = frames->next();
    std::vector<BlockOwner*> owners;
    for (; count > 0; --count) {
      const Queued& parcel = queue_.front();
      WriteParcel({parcel.slot, parcel.from}, rest);
      owners.push_back(parcel.owner);
      queue_.pop_front();
    }
    EndParcels(rest);
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
  for (;;) {
    const absl::StatusOr<std::optional<Parcel>> parcel = ReadParcel(frame);
    if (!parcel.ok()) {
      return shared_.Fail(absl::DataLossError(absl::StrCat(
          "what rank ", peer_, " sent to rank ", shared_.members().rank,
          " came damaged: ", parcel.status().message(),
          "; look for a fault of the memory and network of both machines and of what is between")));
    }
    if (!parcel->has_value()) return;
    Deliver((*parcel)->slot, (*parcel)->block);
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
