// Planes as the contract's tests (data_plane_test.cc) need them: each whole in itself, with what is
// received there to be looked at when an exchange has ended.
#ifndef THINWIRE_TESTS_TRANSPORT_WRAPPED_PLANES_H_
#define THINWIRE_TESTS_TRANSPORT_WRAPPED_PLANES_H_

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <thread>
#include <utility>

#include "kernels/device.h"
#include "tests/host_device/host_device.h"
#include "tests/transport/plane_over.h"
#include "transport/checked/checked.h"
#include "transport/planes.h"
#include "transport/staged/staged.h"

namespace thinwire {

// A data plane that goes together with its control plane. Exchanges may be replaced on the way.
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

// A staged plane and what it stands on. Memory of the host's device is memory, so that the tests'
// own blocks serve.
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
  // The tests look at what they received without a stream, and free what they sent after a failure,
  // when copies may still be queued on it.
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

// A plane whose exchanges end by OnDone, so that the waits of all tests here go by it.
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
      inner_.reset();  // it may be dropped from here on
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

// A data plane that hears of lost peers from the control plane beside it, as UCX's; an engine's
// reader would pass that on.
class BesideControl : public WholeTransport {
 public:
  explicit BesideControl(Transport transport)
      : WholeTransport(std::move(transport)), control_(*this->transport().control) {
    if (control_.size() == 1) return;
    reader_ = std::thread([this, &data = *this->transport().data] {
      while (control_.Receive().ok()) continue;
      data.Abort(control_.status());  // no virtual function of this, which may still be made
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

// NCCL's plane. An exchange of it ends when it is queued; the tests look at what they received, so
// theirs end with a flush. Memory of the host's devices is memory, so that the tests' own blocks
// serve.
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

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_WRAPPED_PLANES_H_
