#include "tests/transport/plane_kinds.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "tests/transport/connect_gloo.h"
#include "tests/transport/connect_nccl.h"
#include "tests/transport/connect_ucx.h"
#include "tests/transport/late_plane.h"
#include "tests/transport/wrapped_planes.h"
#include "transport/checked/checked.h"
#include "transport/in_process/in_process.h"
#include "transport/split/split.h"
#include "transport/spread/spread.h"

namespace thinwire {
namespace {

constexpr DataTraits kHostPlane{Matching::kByTag, Completion::kBlocking, Memory::kHost};
constexpr DataTraits kStagedPlane{Matching::kByTag, Completion::kBlocking, Memory::kStream};
constexpr DataTraits kLateByTag{Matching::kByTag, Completion::kEvents, Memory::kHost};
constexpr DataTraits kNcclPlane{Matching::kByOrder, Completion::kEvents, Memory::kStream};
constexpr DataTraits kLateByOrder{Matching::kByOrder, Completion::kEvents, Memory::kHost};

template <typename Plane>
Planes Wrap(std::vector<Transport> transports) {
  Planes planes;
  for (Transport& transport : transports) {
    planes.push_back(std::make_unique<Plane>(std::move(transport)));
  }
  return planes;
}

Planes MakeNccl(int world) {
  std::vector<Transport> transports = MakeInProcessTransports(world);
  std::vector<std::unique_ptr<StreamPlane>> planes = ConnectNcclPlanes(world);
  for (int r = 0; r < world; ++r) transports[r].data = std::move(planes[r]);
  return Wrap<NcclBesideInProcess>(std::move(transports));
}

// Nodes of two ranks, and of one at the end of an odd world.
Planes MakeSplit(int world) {
  std::vector<Transport> between = MakeInProcessTransports(world);
  for (int first = 0; first < world; first += 2) {
    std::vector<Transport> inside = MakeInProcessTransports(std::min(2, world - first));
    for (size_t i = 0; i < inside.size(); ++i) {
      std::unique_ptr<DataPlane>& data = between[first + i].data;
      data = std::make_unique<Split>(std::make_unique<WholeTransport>(std::move(inside[i])),
                                     std::move(data));
    }
  }
  return Wrap<BesideControl>(std::move(between));
}

// Ranks whose exchanges go by one of so many planes.
Planes MakeSpread(int world, int planes, std::vector<Transport> (*connect)(int)) {
  std::vector<Transport> first = connect(world);
  std::vector<std::vector<Transport>> others(world);
  for (int i = 1; i < planes; ++i) {
    std::vector<Transport> more = connect(world);
    for (int r = 0; r < world; ++r) others[r].push_back(std::move(more[r]));
  }
  for (int r = 0; r < world; ++r) {
    first[r].data = std::make_unique<Spread>(std::move(first[r].data), std::move(others[r]));
  }
  return Wrap<BesideControl>(std::move(first));
}

Planes MakeEvented(Planes planes) {
  for (auto& plane : planes) plane = std::make_unique<ByEvents>(std::move(plane));
  return planes;
}

Planes MakeChecked(Planes planes) {
  for (auto& plane : planes) plane = std::make_unique<Checked>(std::move(plane));
  return planes;
}

Planes MakeLate(int world, Matching matching) {
  return MakeLatePlanes(world,
                        {matching, LateOptions::OutOfOrder(1, std::chrono::microseconds(500))});
}

}  // namespace

std::vector<PlaneKind> PlaneKinds() {
  return {
      {"InProcess", [](int n) { return Wrap<WholeTransport>(MakeInProcessTransports(n)); },
       kHostPlane},
      {"Gloo", [](int n) { return Wrap<WholeTransport>(ConnectGlooRanks(n)); }, kHostPlane, true},
      {"Spread", [](int n) { return MakeSpread(n, 3, MakeInProcessTransports); }, kHostPlane},
      {"GlooLoops", [](int n) { return MakeSpread(n, 2, ConnectGlooRanks); }, kHostPlane, true},
      {"Ucx", [](int n) { return Wrap<BesideControl>(ConnectUcxRanks(n)); }, kHostPlane, true,
       true},
      {"Split", MakeSplit, kHostPlane},
      {"Staged", [](int n) { return Wrap<StagedOnInProcess>(MakeInProcessTransports(n)); },
       kStagedPlane},
      {"Nccl", MakeNccl, kNcclPlane},
      {"NcclEvents", [](int n) { return MakeEvented(MakeNccl(n)); }, kNcclPlane},
      {"CheckedInProcess", [](int n) { return Wrap<CheckedTransport>(MakeInProcessTransports(n)); },
       kHostPlane},
      {"CheckedGloo", [](int n) { return Wrap<CheckedTransport>(ConnectGlooRanks(n)); }, kHostPlane,
       true},
      {"CheckedLateEvents",
       [](int n) { return MakeEvented(MakeChecked(MakeLate(n, Matching::kByTag))); }, kLateByTag},
      {"LateByTag", [](int n) { return MakeLate(n, Matching::kByTag); }, kLateByTag},
      {"LateByTagEvents", [](int n) { return MakeEvented(MakeLate(n, Matching::kByTag)); },
       kLateByTag},
      {"LateByOrder", [](int n) { return MakeLate(n, Matching::kByOrder); }, kLateByOrder},
      {"LateByOrderEvents", [](int n) { return MakeEvented(MakeLate(n, Matching::kByOrder)); },
       kLateByOrder},
  };
}

}  // namespace thinwire
