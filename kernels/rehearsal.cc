#include "kernels/rehearsal.h"

#include <algorithm>

#include "kernels/device_backend.h"
#include "kernels/reduce_parts.h"

namespace thinwire::kernels {
namespace {

// Passed as the stream of a rehearsal.
struct Measured {
  const DeviceApi& api;
  const int ordinal;
  size_t room = 0;  // the largest of any launch
};

template <typename Launch>
concept HasRoom = requires(const Launch& launch) {
  launch.room;
};

template <typename Launch>
void PutRoom(Launch& launch, uint8_t* memory) {
  launch.room = memory;
}

template <typename Launch>
Launch WithoutTiles(Launch launch) {
  if constexpr (requires { launch.jobs; }) {
    launch.jobs.tiles = launch.jobs.count = 0;
  } else {
    launch.tiles = 0;
    launch.numel = 0;
  }
  if constexpr (HasRoom<Launch>) {
    // The room of a launch without tiles, which writes nothing.
    alignas(16) static uint8_t room[sizeof(EntryState)];
    PutRoom(launch, room);
  }
  return launch;
}

// An error while loading occurs again at the launch.
template <auto kEntry, typename Launch>
int Measure(int, const Launch* launch, void* stream) {
  Measured& measured = *static_cast<Measured*>(stream);
  if constexpr (HasRoom<Launch>) {
    measured.room = std::max(measured.room, RoomOf(*launch));
  }
  const Launch none = WithoutTiles(*launch);
  (measured.api.*kEntry)(measured.ordinal, &none, nullptr);
  return 0;
}

const DeviceApi& MeasuringApi() {
  static constexpr DeviceApi kApi = [] {
    DeviceApi api{};  // a DeviceBackend uses only launches and copies
    api.copy = [](int, void*, const void*, size_t, void*) { return 0; };
    api.encode = Measure<&DeviceApi::encode, EncodeLaunch>;
    api.decode = Measure<&DeviceApi::decode, DecodeLaunch>;
    api.reduce = Measure<&DeviceApi::reduce, ReduceLaunch>;
    api.accumulate = Measure<&DeviceApi::accumulate, AccumulateLaunch>;
    api.end_momentum = Measure<&DeviceApi::end_momentum, MomentumLaunch>;
    api.encode_entries = Measure<&DeviceApi::encode_entries, EncodeEntriesLaunch>;
    api.add_entries = Measure<&DeviceApi::add_entries, AddEntriesLaunch>;
    return api;
  }();
  return kApi;
}

class MeasuredLaunches final : public Rehearsal {
 public:
  MeasuredLaunches(const DeviceApi& api, int ordinal) : measured_{api, ordinal} {}
  const Backend& backend() const override { return backend_; }
  size_t room() const override { return measured_.room; }

 private:
  Measured measured_;
  const DeviceBackend backend_{MeasuringApi(), 0, &measured_, [](int) {}};
};

}  // namespace

std::unique_ptr<Rehearsal> NewRehearsal(const DeviceApi& api, int ordinal) {
  return std::make_unique<MeasuredLaunches>(api, ordinal);
}

}  // namespace thinwire::kernels
