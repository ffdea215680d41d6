#include "kernels/device.h"

#include <algorithm>
#include <atomic>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/device_backend.h"
#include "kernels/device_events.h"
#include "kernels/rehearsal.h"

namespace thinwire {
namespace {

using kernels::Arrival;
using kernels::DeviceApi;
using kernels::EventPool;
using SteadyClock = std::chrono::steady_clock;

// Context: the part of a device that all its streams share.
struct Context {
  const DeviceApi& api;
  const int ordinal;
  const std::string name;
  const std::shared_ptr<EventPool> events;

  absl::Status Explain(int error) const {
    return absl::InternalError(absl::StrCat(
        name, " failed: ", api.error_text(error),
        "; gradients of this step are lost. If it comes again, run with CUDA_LAUNCH_BLOCKING=1"));
  }
};

class Stream final : public DeviceStream {
 public:
  enum class Owner { kUs, kCaller };

  Stream(std::shared_ptr<const Context> context, void* handle, Owner owner)
      : context_(std::move(context)),
        handle_(handle),
        owner_(owner),
        backend_(context_->api, context_->ordinal, handle, [this](int error) { Keep(error); }) {}
  ~Stream() override {
    if (owner_ == Owner::kUs) context_->api.destroy_stream(context_->ordinal, handle_);
  }

  const Backend& backend() const override { return backend_; }

  std::unique_ptr<Backend> BackendIn(MutableBytes room) override {
    return std::make_unique<DeviceBackend>(
        context_->api, context_->ordinal, handle_, [this](int error) { Keep(error); }, room);
  }

  void Copy(void* to, const void* from, size_t bytes) override { backend_.Copy(to, from, bytes); }

  std::shared_ptr<DeviceEvent> Record() override {
    std::shared_ptr<EventPool::Event> event;
    if (!Keep(context_->events->Take(&event))) return nullptr;
    if (!Keep(context_->api.record(context_->ordinal, event->handle, handle_))) return nullptr;
    return event;
  }

  void WaitFor(const std::shared_ptr<DeviceEvent>& event) override {
    if (event == nullptr) return;
    Keep(context_->api.wait(context_->ordinal, handle_,
                            static_cast<const EventPool::Event&>(*event).handle));
  }

  bool HasReached(const std::shared_ptr<DeviceEvent>& event) override {
    if (event == nullptr) return true;
    const int error =
        context_->api.query(context_->ordinal, static_cast<const EventPool::Event&>(*event).handle);
    if (error == kernels::kBusy) return false;
    Keep(error);
    return true;
  }

  void* handle() const override { return handle_; }

  bool IsCapturing() override {
    int capturing = 0;
    return Keep(context_->api.is_capturing(context_->ordinal, handle_, &capturing)) &&
           capturing != 0;
  }

  // The driver's own waits have no deadline, so the thread sleeps here until the stream calls.
  // After a failure of the device that call never comes, so the device is checked for failure
  // periodically.
  absl::Status SynchronizeWhile(SteadyClock::time_point deadline,
                                absl::FunctionRef<absl::Status()> health) override {
    const std::shared_ptr<DeviceEvent> event = Record();
    if (HasReached(event)) return status();
    const auto arrival = std::make_shared<Arrival>();
    if (!Keep(arrival->Expect(context_->api, context_->ordinal, handle_))) return status();
    for (;;) {
      const SteadyClock::time_point now = SteadyClock::now();
      if (arrival->AwaitUntil(std::min(deadline, now + kLook)) || HasReached(event)) {
        return status();
      }
      if (absl::Status bad = health(); !bad.ok()) return bad;
      if (SteadyClock::now() < deadline) continue;
      return absl::DeadlineExceededError(
          absl::StrCat(context_->name, " did not finish its work before the deadline; look for a ",
                       "kernel that hangs, or for a step that takes longer than the timeout"));
    }
  }

  absl::Status status() const override {
    const int error = error_;
    return error == 0 ? absl::OkStatus() : context_->Explain(error);
  }

 private:
  static constexpr std::chrono::milliseconds kLook{100};

  // Keeps the first error; true if there is none.
  bool Keep(int error) {
    int none = 0;
    if (error != 0) error_.compare_exchange_strong(none, error);
    return error == 0;
  }

  const std::shared_ptr<const Context> context_;
  void* const handle_;
  const Owner owner_;
  std::atomic<int> error_{0};
  const DeviceBackend backend_;
};

class DeviceImpl final : public Device {
 public:
  DeviceImpl(const DeviceApi& api, int ordinal, std::string name)
      : context_(std::make_shared<Context>(
            Context{api, ordinal, std::move(name), std::make_shared<EventPool>(api, ordinal)})) {}

  std::string name() const override { return context_->name; }

  absl::StatusOr<std::string> identity() const override {
    char text[kernels::kIdentityBytes] = {};
    const int error = api().identify(context_->ordinal, text);
    return error == 0 ? absl::StatusOr<std::string>(text) : context_->Explain(error);
  }

  absl::StatusOr<PeerReach> ReachesPeers() const override {
    int least = 0;
    const int error = api().reaches_peers(context_->ordinal, &least);
    if (error != 0) return context_->Explain(error);
    return static_cast<PeerReach>(least);
  }

  absl::Status RunOn(absl::FunctionRef<void()> work) override {
    const auto call = [](void* argument) {
      (*static_cast<absl::FunctionRef<void()>*>(argument))();
    };
    const int error = api().run_on(context_->ordinal, call, &work);
    return error == 0 ? absl::OkStatus() : context_->Explain(error);
  }

  bool Holds(const void* address) const override {
    int holder = -1;
    return api().device_of(context_->ordinal, address, &holder) == 0 && holder == context_->ordinal;
  }

  absl::StatusOr<DeviceMemory> Allocate(size_t bytes) override {
    void* memory = nullptr;
    const int error = api().allocate(context_->ordinal, bytes, &memory);
    if (error != 0) return OutOfMemory(error, bytes, "");
    return DeviceMemory(static_cast<uint8_t*>(memory), [context = context_](uint8_t* memory) {
      context->api.release(context->ordinal, memory);
    });
  }

  absl::StatusOr<DeviceMemory> AllocatePinned(size_t bytes) override {
    void* memory = nullptr;
    const int error = api().allocate_pinned(context_->ordinal, bytes, &memory);
    if (error != 0) return OutOfMemory(error, bytes, "pinned host memory for ");
    return DeviceMemory(static_cast<uint8_t*>(memory), [context = context_](uint8_t* memory) {
      context->api.release_pinned(context->ordinal, memory);
    });
  }

  std::unique_ptr<Rehearsal> Rehearse() const override {
    return kernels::NewRehearsal(api(), context_->ordinal);
  }

  absl::StatusOr<std::unique_ptr<DeviceStream>> MakeStream() override {
    void* handle = nullptr;
    if (const int error = api().make_stream(context_->ordinal, &handle); error != 0) {
      return context_->Explain(error);
    }
    return std::make_unique<Stream>(context_, handle, Stream::Owner::kUs);
  }

  std::unique_ptr<DeviceStream> Adopt(void* stream) override {
    return std::make_unique<Stream>(context_, stream, Stream::Owner::kCaller);
  }

 private:
  const DeviceApi& api() const { return context_->api; }
  absl::Status OutOfMemory(int error, size_t bytes, const char* what) const {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no ", bytes, " bytes of ", what, context_->name, ": ", api().error_text(error),
        "; free some (torch.cuda.empty_cache() returns what torch keeps unused), ",
        "or take smaller or fewer chunks (chunk_bytes, lanes)"));
  }

  const std::shared_ptr<const Context> context_;
};

constexpr std::string_view kCuda = "cuda";

std::string VersionText(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

// The oldest driver for a major version of CUDA's runtime: table 2 of CUDA's release notes.
std::string DriverFor(int runtime) {
  switch (runtime / 1000) {
    case 12: return "525 or newer";
    case 13: return "580 or newer";
    default: return absl::StrCat("one for CUDA ", VersionText(runtime));
  }
}

std::string WhyNoDriver(const DeviceApi& api) {
  int known = 0;
  if (api.driver_version(&known) != 0 || known == 0) return "there is no NVIDIA driver";
  return absl::StrCat("the NVIDIA driver is for CUDA ", VersionText(known),
                      " and libthinwire_cuda.so for CUDA ", VersionText(api.runtime_version),
                      ", which needs driver ", DriverFor(api.runtime_version),
                      "; update the driver, build with an older CUDA toolkit, or keep gradients on "
                      "the host");
}

}  // namespace

std::shared_ptr<Device> MakeDevice(const DeviceApi& api, int ordinal, std::string name) {
  return std::make_shared<DeviceImpl>(api, ordinal, std::move(name));
}

absl::StatusOr<int> CountDevices(const DeviceApi& api) {
  int count = 0;
  const int error = api.device_count(&count);
  if (error == 0 && count > 0) return count;
  std::string why = error == 0 ? "there is none" : api.error_text(error);
  if (error == kernels::kInsufficientDriver) why = WhyNoDriver(api);
  return absl::UnimplementedError(absl::StrCat("no CUDA device can be used here: ", why));
}

absl::StatusOr<int> CountDevices(const std::string& library) {
  const absl::StatusOr<const DeviceApi*> api = LoadCuda(library);
  if (!api.ok()) return api.status();
  return CountDevices(**api);
}

absl::StatusOr<std::shared_ptr<Device>> OpenDevice(std::string_view name,
                                                   const std::string& library) {
  int ordinal = 0;
  std::string_view rest = name.substr(0, kCuda.size()) == kCuda ? name.substr(kCuda.size()) : "?";
  if (!rest.empty() &&
      (rest[0] != ':' ||
       !absl::SimpleAtoi(absl::string_view(rest.data() + 1, rest.size() - 1), &ordinal))) {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown device '", std::string(name), "', expected cpu, cuda or cuda:N"));
  }
  const absl::StatusOr<int> count = CountDevices(library);
  if (!count.ok()) return count.status();
  if (ordinal < 0 || ordinal >= *count) {
    return absl::InvalidArgumentError(absl::StrCat("there is no ", std::string(name), ", expected ",
                                                   "cuda:0 to cuda:", *count - 1));
  }
  const absl::StatusOr<const DeviceApi*> api = LoadCuda(library);
  return MakeDevice(**api, ordinal, absl::StrCat("cuda:", ordinal));
}

}  // namespace thinwire
