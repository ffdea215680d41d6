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
    : first_(std::move(first)), others_(std::move(others)), planes_(AllOf(*first_, others_)) {
  for (const Transport& other : others_) ties_.emplace_back(failure(), other.data->failure());
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
