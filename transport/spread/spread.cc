#include "transport/spread/spread.h"

#include <utility>

namespace thinwire {
namespace {

std::vector<DataPlane*> AllOf(DataPlane& first, const std::vector<Transport>& others) {
  std::vector<DataPlane*> planes{&first};
  for (const Transport& other : others) planes.push_back(other.data.get());
  return planes;
}

}  // namespace

Spread::Spread(std::unique_ptr<DataPlane> first, std::vector<Transport> others)
    : first_(std::move(first)), others_(std::move(others)), planes_(AllOf(*first_, others_)) {}

std::unique_ptr<Exchange> Spread::Start(uint64_t tag, std::span<const Bytes> send,
                                        std::span<const MutableBytes> recv) {
  return PlaneFor(tag).Start(tag, send, recv);
}

std::unique_ptr<Exchange> Spread::Expect(uint64_t tag, std::span<const MutableBytes> recv) {
  return PlaneFor(tag).Expect(tag, recv);
}

DataPlane& Spread::PlaneFor(uint64_t tag) {
  if (absl::Status failed = status(); !failed.ok()) Abort(std::move(failed));
  return *planes_[tag % planes_.size()];
}

void Spread::Abort(absl::Status reason) {
  for (DataPlane* const plane : planes_) plane->Abort(reason);
}

absl::Status Spread::status() const {
  for (const DataPlane* const plane : planes_) {
    if (absl::Status status = plane->status(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

uint64_t Spread::bytes_sent() const {
  uint64_t bytes = 0;
  for (const DataPlane* const plane : planes_) bytes += plane->bytes_sent();
  return bytes;
}

}  // namespace thinwire
