#include "kernels/rehearsal.h"

#include <algorithm>

#include "kernels/device_backend.h"
#include "kernels/reduce_parts.h"

namespace thinwire::kernels {
namespace {

// The stream of such a table is a counter of bytes.
template <typename Launch>
int Count(int, const Launch* launch, void* room) {
  size_t& most = *static_cast<size_t*>(room);
  most = std::max(most, RoomOf(*launch));
  return 0;
}

template <typename Launch>
int Ignore(int, const Launch*, void*) {
  return 0;
}

const DeviceApi& CountingApi() {
  static constexpr DeviceApi kApi = [] {
    DeviceApi api{};  // a DeviceBackend asks for nothing but launches and copies
    api.copy = [](int, void*, const void*, size_t, void*) { return 0; };
    api.encode = Count<EncodeLaunch>;
    api.decode = Count<DecodeLaunch>;
    api.reduce = Count<ReduceLaunch>;
    api.accumulate = Ignore<AccumulateLaunch>;
    api.end_momentum = Ignore<MomentumLaunch>;
    api.encode_entries = Ignore<EncodeEntriesLaunch>;
    api.add_entries = Ignore<AddEntriesLaunch>;
    return api;
  }();
  return kApi;
}

class CountedLaunches final : public Rehearsal {
 public:
  const Backend& backend() const override { return backend_; }
  size_t room() const override { return room_; }

 private:
  size_t room_ = 0;
  const DeviceBackend backend_{CountingApi(), 0, &room_, [](int) {}};
};

}  // namespace

std::unique_ptr<Rehearsal> NewRehearsal() { return std::make_unique<CountedLaunches>(); }

}  // namespace thinwire::kernels
