#include "transport/gloo/gloo_links.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/gloo/gloo_pair.h"
#include "transport/store.h"

namespace thinwire {
namespace {

// Damage to a header would turn it into a block that never matches, so the header has a checksum;
// the block may have one of its own (transport/checked).
struct Header {
  uint64_t slot = 0;
  uint32_t bytes = 0;
  uint32_t sum = 0;  // of all bytes before it

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
  sender_->send(peer_, slot_, offset, bytes);  // Gloo accepts less than the receive has room for
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

namespace {

constexpr size_t kControlFrames = 16;

// The most sites that exchange in one hop (MOST_IN_ONE_HOP in thinwire/torch/sites/meeting.py);
// their small pieces rely on these frames.
constexpr int kFewRanks = 8;
struct FrameSize {
  size_t bytes, count_of_few, count_of_many;  // frames per peer, in worlds of few ranks and of more
};
// These hold a word, a block of 4 KiB, and the largest block. A long link is idle when all of these
// have left and the receiver's first notice is not back, so there are more of the largest in a
// world of few ranks, where memory allows it: 0.6 MiB per peer, and 0.2 MiB in larger worlds.
// Decision 28 has the figures.
constexpr FrameSize kParcelFrames[] = {
    {512, 8, 8}, {4096 + 512, 8, 8}, {GlooPeer::kLargestParcel + 64, 16, 4}};

// The bytes of a frame, at least 1, without the zeros at its end.
size_t WithoutZeros(Bytes frame) {
  const auto end = std::find_if(frame.rbegin(), frame.rend(), [](uint8_t b) { return b != 0; });
  return std::max<size_t>(frame.rend() - end, 1);
}

constexpr std::chrono::microseconds kAcknowledged(200);  // between two checks

}  // namespace

GlooLinks::GlooLinks(std::shared_ptr<gloo::Context> context, std::unique_ptr<GlooLoop> loop,
                     std::chrono::milliseconds last_words)
    : context_(std::move(context)),
      members_{context_->rank, context_->size},
      last_words_(last_words),
      loop_(std::move(loop)) {
  for (int peer = 0; peer < members_.size; ++peer) {
    peers_.push_back(IsConnected(*context_, peer) ? std::make_unique<GlooPeer>(*this, peer)
                                                  : nullptr);
  }
  listener_ = failure_->Listen([this] { OnFailure(); });
}

GlooLinks::~GlooLinks() {
  failure_->Fail(absl::CancelledError("the transport was destroyed"));
  Flush(Clock::now() + last_words_);
  CloseConnections(*context_, *loop_);
}

absl::Status GlooLinks::Send(int to, const ControlFrame& frame) {
  if (peers_[to] != nullptr) peers_[to]->SendFrame(frame);
  return failure_->reason();
}

void GlooLinks::PushFrame(int from, const Bytes& frame) {
  ControlMessage message;
  message.from = from;
  std::copy(frame.begin(), frame.end(), message.frame.begin());
  const absl::MutexLock lock(&mu_);
  frames_.push_back(message);
}

absl::StatusOr<ControlMessage> GlooLinks::Receive() {
  {
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(this, &GlooLinks::IsReady));
    if (!frames_.empty()) {
      const ControlMessage message = frames_.front();
      frames_.pop_front();
      return message;
    }
  }
  return failure_->reason();
}

void GlooLinks::Flush(Deadline deadline) {
  if (!failure_->failed()) return;
  for (const auto& peer : peers_) {
    if (peer != nullptr) peer->Drain(deadline);
  }
}

void GlooLinks::OnFailure() {
  loop_->Post([this] {
    EndBlocks();
    EndFrames(2);
  });
}

// A peer that fails sends its reason and then closes all its connections, and a connection of
// another plane may be seen to close before the loop has read that reason here. What had arrived
// when the planes failed is among the events of the next turn at the latest, and has been read in
// the turn after it.
void GlooLinks::EndFrames(int turns) {
  if (turns > 0) return loop_->Post([this, turns] { EndFrames(turns - 1); });
  const absl::MutexLock lock(&mu_);
  frames_ended_ = true;
}

void GlooLinks::EndBlocks() {
  lost_ = failure_->reason();
  for (const auto& peer : peers_) {
    if (peer != nullptr) peer->EndBlocks(lost_);
  }
}

// One peer.

GlooPeer::GlooPeer(GlooLinks& links, int peer)
    : links_(links),
      peer_(peer),
      control_(links.context(), peer, kControlSlot, kControlBytes, kControlFrames) {
  links_.loop().Post([this] { Observe(links_.context(), peer_, this); });
  Post();
}

void GlooPeer::Post() {
  if (!posted_.exchange(true)) links_.loop().Post([this] { Run(); });
}

void GlooPeer::Run() {
  posted_ = false;
  try {
    control_.Refill();
    SendFrames();
    for (const auto& frames : sizes_) frames->Refill();
    PackParcels();
  } catch (const std::exception&) {
    // The connection is closed; OnClosed reports it.
  }
  CollectParcels();  // those that have already left
}

void GlooPeer::OnProgress() {
  CollectMessages();
  CollectParcels();
  const bool left = CollectFrames();
  bool wanted = control_.low();
  if (left && !wanted) {
    const absl::MutexLock lock(&mu_);
    wanted = !frames_.empty();
  }
  if (wanted) Post();
}

// Any thread may close a connection, while the loop handles the peer.
void GlooPeer::OnClosed(const std::string& why) {
  {
    const absl::MutexLock lock(&mu_);
    closed_ = true;
    left_.SignalAll();
  }
  links_.loop().Post([this, why] { HearThatItClosed(why); });
}

// A peer's last frames and its end may arrive together: take the frames first.
void GlooPeer::HearThatItClosed(const std::string& why) {
  CollectMessages();
  CollectParcels();
  CollectFrames();
  links_.failure()->Fail(absl::UnavailableError(
      absl::StrCat("rank ", peer_, " is gone: its connection to rank ", links_.members().rank,
                   " closed (", why, "); look why that process ended")));
}

void GlooPeer::EndBlocks(const absl::Status& reason) {
  std::vector<BlockOwner*> owners;
  for (const Message& message : messages_) owners.push_back(message.owner);
  for (const auto& [slot, expected] : expected_) owners.push_back(expected.owner);
  for (const Queued& parcel : queue_) owners.push_back(parcel.owner);
  for (const auto& frames : sizes_) {
    const std::vector<BlockOwner*> sending = frames->ForgetOwners();
    owners.insert(owners.end(), sending.begin(), sending.end());
  }
  messages_.clear();
  expected_.clear();
  queue_.clear();
  early_.clear();
  for (BlockOwner* const owner : owners) owner->OnBlockEnded(reason);
}

// Control frames.

void GlooPeer::SendFrame(const ControlFrame& frame) {
  {
    const absl::MutexLock lock(&mu_);
    if (closed_) return;
    frames_.push_back(frame);
  }
  Post();
}

void GlooPeer::SendFrames() {
  do {
    while (control_.has_room() && TakeFrame(control_.next())) {
      control_.Send(WithoutZeros(control_.next()), {});
    }
    // A frame that finds its receive and room in the socket has already left, and makes room.
  } while (CollectFrames());
}

bool GlooPeer::TakeFrame(MutableBytes to) {
  const absl::MutexLock lock(&mu_);
  if (frames_.empty() || closed_) return false;
  std::memcpy(to.data(), frames_.front().data(), kControlBytes);
  frames_.pop_front();
  ++under_way_;
  return true;
}

bool GlooPeer::CollectFrames() {
  const bool left = control_.Collect([this](Bytes frame) { links_.PushFrame(peer_, frame); });
  if (!left) return false;
  const absl::MutexLock lock(&mu_);
  under_way_ = control_.under_way();
  if (HaveLeft()) left_.SignalAll();
  return true;
}

void GlooPeer::Drain(Deadline deadline) {
  {
    const absl::MutexLock lock(&mu_);
    while (!HaveLeft() && Clock::now() < deadline) left_.WaitUntil(&mu_, deadline);
  }
  while (IsOnItsWay(links_.context(), peer_) && Clock::now() < deadline) {
    std::this_thread::sleep_for(kAcknowledged);
  }
}

// Messages.

void GlooPeer::ReceiveMessage(uint64_t slot, gloo::transport::UnboundBuffer& buffer,
                              BlockOwner* owner) {
  messages_.push_back({&buffer, false, owner});
  buffer.recv(peer_, slot);
}

void GlooPeer::SendMessage(uint64_t slot, gloo::transport::UnboundBuffer& buffer,
                           BlockOwner* owner) {
  messages_.push_back({&buffer, true, owner});
  buffer.send(peer_, slot);
}

void GlooPeer::CollectMessages() {
  std::vector<BlockOwner*> ended;
  std::erase_if(messages_, [&](const Message& message) {
    const size_t count =
        message.outgoing ? TakeSent(*message.buffer) : TakeReceived(*message.buffer);
    if (count > 0) ended.push_back(message.owner);
    return count > 0;
  });
  for (BlockOwner* const owner : ended) owner->OnBlockEnded(absl::OkStatus());
}

// Parcels.

void GlooPeer::MakeParcelFrames() {
  if (!sizes_.empty()) return;
  uint64_t slot = kControlSlot;
  for (const FrameSize& size : kParcelFrames) {
    slot += 2;
    const bool few = links_.members().size <= kFewRanks;
    sizes_.push_back(std::make_unique<GlooFrames>(links_.context(), peer_, slot, size.bytes,
                                                  few ? size.count_of_few : size.count_of_many));
  }
  Post();
}

void GlooPeer::ReceiveParcel(uint64_t slot, MutableBytes to, BlockOwner* owner) {
  MakeParcelFrames();
  expected_.insert({slot, {to, owner}});
  if (const auto early = early_.extract(slot); !early.empty()) Deliver(slot, early.mapped());
}

// Posted, so that parcels which other tasks of this turn of the loop send share the frame.
void GlooPeer::SendParcel(uint64_t slot, Bytes from, BlockOwner* owner) {
  MakeParcelFrames();
  queue_.push_back({slot, from, owner});
  Post();
}

void GlooPeer::PackParcels() {
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
    frames->Send(bytes, std::move(owners));
  }
}

// The smallest free frame that is large enough; null if there is none.
GlooFrames* GlooPeer::FrameFor(size_t bytes) {
  for (const auto& frames : sizes_) {
    if (bytes <= frames->bytes() && frames->has_room()) return frames.get();
  }
  return nullptr;
}

void GlooPeer::CollectParcels() {
  bool wanted = false;
  for (const auto& frames : sizes_) {
    const bool left = frames->Collect([this](Bytes frame) { Unpack(frame); });
    wanted = wanted || frames->low() || (left && !queue_.empty());
  }
  if (wanted && links_.lost().ok()) Post();
}

void GlooPeer::Unpack(Bytes frame) {
  for (;;) {
    const absl::StatusOr<std::optional<Parcel>> parcel = ReadParcel(frame);
    if (!parcel.ok()) {
      return links_.failure()->Fail(absl::DataLossError(absl::StrCat(
          "what rank ", peer_, " sent to rank ", links_.members().rank,
          " came damaged: ", parcel.status().message(),
          "; look for a fault of the memory and network of both machines and of what is between")));
    }
    if (!parcel->has_value()) return;
    Deliver((*parcel)->slot, (*parcel)->block);
  }
}

// A block's size is part of its slot; a block that still has the wrong size waits for its deadline
// like any other block without a match.
void GlooPeer::Deliver(uint64_t slot, Bytes block) {
  const auto found = expected_.find(slot);
  if (found == expected_.end() || found->second.to.size() != block.size()) {
    early_.insert({slot, {block.begin(), block.end()}});
    return;
  }
  const Expected expected = found->second;
  expected_.erase(found);
  std::memcpy(expected.to.data(), block.data(), block.size());
  expected.owner->OnBlockEnded(absl::OkStatus());
}

}  // namespace thinwire
