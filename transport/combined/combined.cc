#include "transport/combined/combined.h"

#include <utility>
#include <vector>

namespace thinwire {
namespace {

// The blocks with the ranks of this node emptied, so that they are not sent.
template <typename Block>
std::vector<Block> Others(std::span<const Block> blocks, size_t first, size_t count) {
  std::vector<Block> others(blocks.begin(), blocks.end());
  for (size_t rank = first; rank < first + count; ++rank) others[rank] = {};
  return others;
}

std::vector<DataPlane*> AllOf(DataPlane& first, const std::vector<Transport>& others) {
  std::vector<DataPlane*> planes{&first};
  for (const Transport& other : others) planes.push_back(other.data.get());
  return planes;
}

}  // namespace

class Split::InFlight final : public Exchange {
 public:
  InFlight(Split& split, std::unique_ptr<Exchange> inside, std::unique_ptr<Exchange> between)
      : split_(split), inside_(std::move(inside)), between_(std::move(between)) {}

  void Send(std::span<const Bytes> send) override {
    between_->Send(Others(send, split_.first_, split_.count_));
    inside_->Send(send.subspan(split_.first_, split_.count_));
  }

  // Blocks between nodes move by themselves; those inside may move only while a thread waits, so
  // they come first. If one half fails, the other one ends too: its blocks must also be free.
  absl::Status Wait(Deadline deadline) override {
    const absl::Status inside = inside_->Wait(deadline);
    const absl::Status between = between_->Wait(deadline);
    return inside.ok() ? between : inside;
  }

 private:
  Split& split_;
  const std::unique_ptr<Exchange> inside_, between_;
};

Split::Split(std::unique_ptr<DataPlane> inside, std::unique_ptr<DataPlane> between)
    : inside_(std::move(inside)),
      between_(std::move(between)),
      first_(between_->rank() - inside_->rank()),
      count_(inside_->size()),
      inside_to_between_(inside_->failure()->PassOn(between_->failure())),
      between_to_inside_(between_->failure()->PassOn(inside_->failure())) {}

std::unique_ptr<Exchange> Split::Start(uint64_t tag, std::span<const Bytes> send,
                                       std::span<const MutableBytes> recv) {
  std::unique_ptr<Exchange> between =
      between_->Start(tag, Others(send, first_, count_), Others(recv, first_, count_));
  std::unique_ptr<Exchange> inside =
      inside_->Start(tag, send.subspan(first_, count_), recv.subspan(first_, count_));
  return std::make_unique<InFlight>(*this, std::move(inside), std::move(between));
}

std::unique_ptr<Exchange> Split::Expect(uint64_t tag, std::span<const MutableBytes> recv) {
  std::unique_ptr<Exchange> between = between_->Expect(tag, Others(recv, first_, count_));
  if (between == nullptr) return nullptr;
  std::unique_ptr<Exchange> inside = inside_->Expect(tag, recv.subspan(first_, count_));
  return std::make_unique<InFlight>(*this, std::move(inside), std::move(between));
}

Spread::Spread(std::unique_ptr<DataPlane> first, std::vector<Transport> others)
    : first_(std::move(first)), others_(std::move(others)), planes_(AllOf(*first_, others_)) {
  for (const Transport& other : others_) {
    passed_on_.push_back(failure()->PassOn(other.data->failure()));
    passed_on_.push_back(other.data->failure()->PassOn(failure()));
  }
}

std::unique_ptr<Exchange> Spread::Start(uint64_t tag, std::span<const Bytes> send,
                                        std::span<const MutableBytes> recv) {
  return PlaneFor(tag).Start(tag, send, recv);
}

std::unique_ptr<Exchange> Spread::Expect(uint64_t tag, std::span<const MutableBytes> recv) {
  return PlaneFor(tag).Expect(tag, recv);
}

uint64_t Spread::bytes_sent() const {
  uint64_t bytes = 0;
  for (const DataPlane* const plane : planes_) bytes += plane->bytes_sent();
  return bytes;
}

}  // namespace thinwire
