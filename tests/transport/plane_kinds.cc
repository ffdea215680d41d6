#include "tests/transport/plane_kinds.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <thread>
#include <utility>

#include "kernels/device.h"
#include "tests/host_device/host_device.h"
#include "tests/transport/connect_gloo.h"
#include "tests/transport/connect_nccl.h"
#include "tests/transport/connect_ucx.h"
#include "tests/transport/late_plane.h"
#include "tests/transport/plane_over.h"
#include "transport/checked/checked.h"
#include "transport/combined/combined.h"
#include "transport/in_process/in_process.h"
#include "transport/planes.h"
#include "transport/staged/staged.h"

namespace thinwire {
namespace {

// The planes as data_plane_test.cc needs them: each is complete, and received blocks can be read
// once an exchange has ended.

// A data plane that owns its control plane. Derived classes may replace its exchanges.
class WholeTransport : public PlaneOver {
 public:
  explicit WholeTransport(Transport transport) : transport_(std::move(transport)) {}

 protected:
  DataPlane& inner() const override { return *transport_.data; }
  const Transport& transport() const { return transport_; }

 private:
  const Transport transport_;
};

class CheckedTransport final : public WholeTransport {
 public:
  explicit CheckedTransport(Transport transport) : WholeTransport(Checking(std::move(transport))) {}

 private:
  static Transport Checking(Transport transport) {
    transport.data = std::make_unique<Checked>(std::move(transport.data));
    return transport;
  }
};

// A staged plane and everything below it. The host device's memory is normal memory, so the tests'
// own blocks can be used.
class StagedOnInProcess final : public WholeTransport {
 public:
  explicit StagedOnInProcess(Transport host)
      : WholeTransport(std::move(host)),
        device_(MakeDevice(kernels::HostDeviceApi(), 0, "host:0")),
        stream_(*device_->MakeStream()),
        slabs_(*device_, SlabPool::Memory::kPinned),
        staged_(*Staged::Make(WholeTransport::inner(), *device_, *stream_, slabs_,
                              std::chrono::seconds(20))) {}
  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override {
    return std::make_unique<Synchronized>(staged_->Start(tag, send, recv), *stream_);
  }

 private:
  // The tests read received blocks without a stream, and free sent blocks after a failure, when
  // copies may still be queued on the stream. So Wait also waits for the stream.
  class Synchronized final : public Exchange {
   public:
    Synchronized(std::unique_ptr<Exchange> inner, DeviceStream& stream)
        : inner_(std::move(inner)), stream_(stream) {}
    absl::Status Wait(Deadline deadline) override {
      absl::Status status = inner_->Wait(deadline);
      status.Update(stream_.Synchronize(deadline));
      return status;
    }

   private:
    const std::unique_ptr<Exchange> inner_;
    DeviceStream& stream_;
  };

  DataPlane& inner() const override { return *staged_; }

  const std::shared_ptr<Device> device_;
  const std::unique_ptr<DeviceStream> stream_;
  SlabPool slabs_;
  const std::unique_ptr<Staged> staged_;
};

// A plane on which every Wait uses OnDone, so that the tests cover it.
class ByEvents final : public PlaneOver {
 public:
  explicit ByEvents(std::unique_ptr<DataPlane> inner) : inner_(std::move(inner)) {}
  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override {
    return std::make_unique<Evented>(*inner_, inner_->Start(tag, send, recv));
  }

 private:
  class Evented final : public Exchange {
   public:
    Evented(DataPlane& plane, std::unique_ptr<Exchange> inner)
        : plane_(plane), inner_(std::move(inner)) {}
    absl::Status Wait(Deadline deadline) override {
      std::promise<absl::Status> ended;
      std::future<absl::Status> status = ended.get_future();
      inner_->OnDone([&ended](absl::Status status) { ended.set_value(std::move(status)); });
      inner_.reset();  // it may be dropped now
      if (status.wait_until(deadline) == std::future_status::timeout) {
        plane_.Abort(absl::DeadlineExceededError("the exchange did not end in time"));
      }
      return status.get();
    }

   private:
    DataPlane& plane_;
    std::unique_ptr<Exchange> inner_;
  };

  DataPlane& inner() const override { return *inner_; }

  const std::unique_ptr<DataPlane> inner_;
};

// A data plane that learns of lost peers from its control plane, as UCX's does. In an engine the
// reader passes these on.
class BesideControl : public WholeTransport {
 public:
  explicit BesideControl(Transport transport)
      : WholeTransport(std::move(transport)), control_(*this->transport().control) {
    if (control_.size() == 1) return;
    reader_ = std::thread([this, &data = *this->transport().data] {
      while (control_.Receive().ok()) continue;
      data.Abort(control_.status());  // not a virtual function: *this may not be complete yet
    });
  }
  ~BesideControl() override {
    control_.Abort(absl::CancelledError("the test is over"));
    if (reader_.joinable()) reader_.join();
  }

 private:
  ControlPlane& control_;
  std::thread reader_;
};

// NCCL's plane. Its exchanges end when they are queued, but the tests read the received blocks, so
// these exchanges end with a flush. The host devices' memory is normal memory, so the tests' own
// blocks can be used.
class NcclBesideInProcess final : public BesideControl {
 public:
  using BesideControl::BesideControl;
  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override {
    return std::make_unique<Flushed>(*inner().of_streams(), inner().Start(tag, send, recv));
  }

 private:
  class Flushed final : public Exchange {
   public:
    Flushed(StreamPlane& plane, std::unique_ptr<Exchange> inner)
        : plane_(plane), inner_(std::move(inner)) {}
    absl::Status Wait(Deadline deadline) override {
      const absl::Status status = inner_->Wait(deadline);
      return status.ok() ? plane_.Flush()->Wait(deadline) : status;
    }
    void OnDone(std::function<void(absl::Status)> done) override {
      inner_->OnDone([&plane = plane_, done = std::move(done)](absl::Status status) {
        if (!status.ok()) return done(std::move(status));
        plane.Flush()->OnDone(done);
      });
    }

   private:
    StreamPlane& plane_;
    const std::unique_ptr<Exchange> inner_;
  };
};

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

// Nodes of two ranks; the last node of an odd world has one.
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

// Ranks whose exchanges are spread over `planes` planes.
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
