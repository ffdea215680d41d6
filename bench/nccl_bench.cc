// Microseconds that a host spends on one exchange over NCCL of a rank with itself: by the plane
// (begun, issued and waited for), and by the fewest calls that do the same (an event, a group of
// ncclSend and ncclRecv, polls until it is launched, an event), alternating on one thread. Kernels
// end outside of the timed part. It also registers memory, checks the bytes, and aborts.
//
//   nccl_bench --nccl PATH                a stand-in's library, and CPU threads
//   nccl_bench --nccl PATH --cuda [PATH]  the real library on the first GPU
#include <dlfcn.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench/times.h"
#include "kernels/device.h"
#include "tests/host_device/host_device.h"
#include "tests/transport/fake_nccl/fake_nccl.h"
#include "transport/nccl/nccl.h"

namespace thinwire {
namespace {

constexpr int kWarmUp = 50, kExchanges = 1000;
constexpr size_t kBytes = 4096;  // per block
constexpr int kByte = 7;
constexpr std::chrono::seconds kPatience(30);

[[noreturn]] void Fail(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

void Check(const absl::Status& status) {
  if (!status.ok()) Fail(status);
}

template <typename T>
T Get(absl::StatusOr<T> value) {
  Check(value.status());
  return *std::move(value);
}

// Microseconds of each exchange, and CPU microseconds of the thread for all of them.
struct Row {
  std::vector<double> us;
  double processor_us = 0.0;

  template <typename Work>
  void Time(bool counts, const Work& work) {
    const double begin = Now(), processor = ProcessorSeconds(RUSAGE_THREAD);
    work();
    const double end = Now();
    if (!counts) return;
    us.push_back(1e6 * (end - begin));
    processor_us += 1e6 * (ProcessorSeconds(RUSAGE_THREAD) - processor);
  }
  void Print(const char* name) const {
    std::printf("%-8s %7.1f us an exchange (%.1f to %.1f), %.1f us of processor\n", name,
                Quantile(us, 0.5), Quantile(us, 0.25), Quantile(us, 0.75),
                processor_us / static_cast<double>(us.size()));
  }
};

// The library's communicator used directly, and its stream.
class Own {
 public:
  Own(const NcclLibrary& nccl, Device& device, const NcclUniqueId& id)
      : nccl_(nccl), device_(device), stream_(Get(device.MakeStream())) {
    NcclConfig config;
    Check(device_.RunOn([&] { nccl_.comm_init_rank_config(&handle_, 1, id, 0, &config); }));
    Await();
  }
  ~Own() {
    nccl_.comm_finalize(handle_);
    Await();
    device_.RunOn([&] { nccl_.comm_destroy(handle_); }).IgnoreError();
  }
  Own(const Own&) = delete;
  Own& operator=(const Own&) = delete;

  void Exchange(const uint8_t* out, uint8_t* in, DeviceStream& lane) {
    stream_->WaitFor(lane.Record());
    Check(device_.RunOn([&] {
      nccl_.group_start();
      nccl_.send(out, kBytes, kNcclBytes, 0, handle_, stream_->handle());
      nccl_.recv(in, kBytes, kNcclBytes, 0, handle_, stream_->handle());
      nccl_.group_end();
    }));
    Await();
    lane.WaitFor(stream_->Record());
  }

 private:
  void Await() {
    for (NcclResult state = kNcclInProgress; state == kNcclInProgress;) {
      nccl_.comm_get_async_error(handle_, &state);
      if (state == kNcclInProgress) std::this_thread::yield();
      if (state != kNcclOk && state != kNcclInProgress) {
        Fail(absl::InternalError(nccl_.get_last_error(handle_)));
      }
    }
  }

  const NcclLibrary& nccl_;
  Device& device_;
  const std::unique_ptr<DeviceStream> stream_;
  NcclHandle handle_ = nullptr;
};

void Run(const std::shared_ptr<const NcclLibrary>& nccl, const std::shared_ptr<Device>& device) {
  std::array<NcclUniqueId, 2> ids;
  for (NcclUniqueId& id : ids) nccl->get_unique_id(&id);
  const auto stream = Get(device->MakeStream());
  const auto plane = Get(JoinNccl(nccl, {0, 1}, ids[0], device, Clock::now() + kPatience));
  Own own(*nccl, *device, ids[1]);
  const bool registers = plane->traits().allocates;
  const DeviceMemory out = Get(registers ? plane->Allocate(kBytes) : device->Allocate(kBytes));
  const DeviceMemory in = Get(registers ? plane->Allocate(kBytes) : device->Allocate(kBytes));
  const DeviceMemory host = Get(device->AllocatePinned(2 * kBytes));
  std::memset(host.get(), kByte, kBytes);
  const Bytes send(out.get(), kBytes);
  const MutableBytes recv(in.get(), kBytes);
  const auto lane = plane->On(*stream);
  stream->Copy(out.get(), host.get(), kBytes);
  Row by_plane, by_library;
  for (int i = 0; i < kWarmUp + kExchanges; ++i) {
    by_plane.Time(i >= kWarmUp, [&] {
      Check(lane->Start(1, {&send, 1}, {&recv, 1})->Wait(Clock::now() + kPatience));
    });
    Check(stream->Synchronize(Clock::now() + kPatience));
    if (i == 0) {
      stream->Copy(host.get() + kBytes, in.get(), kBytes);
      Check(stream->Synchronize(Clock::now() + kPatience));
      if (std::memcmp(host.get(), host.get() + kBytes, kBytes) != 0) {
        Fail(absl::InternalError("other bytes came than were sent"));
      }
    }
    by_library.Time(i >= kWarmUp, [&] { own.Exchange(out.get(), in.get(), *stream); });
    Check(stream->Synchronize(Clock::now() + kPatience));
  }
  std::printf("NCCL %s, %zu bytes, memory %sregistered\n", nccl->version.c_str(), kBytes,
              registers ? "" : "not ");
  by_library.Print("library");
  by_plane.Print("plane");
  std::printf("plane beyond the library: %.1f us\n",
              Quantile(by_plane.us, 0.5) - Quantile(by_library.us, 0.5));
  Check(lane->Start(1, {&send, 1}, {&recv, 1})->Wait(Clock::now() + kPatience));
  plane->Abort(absl::CancelledError("the benchmark is over"));
  lane->Flush()->Wait(Clock::now() + kPatience).IgnoreError();
}

int Main(int argc, char** argv) {
  std::string library, cuda;
  bool on_gpu = false;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool has_value = i + 1 < argc && argv[i + 1][0] != '-';
    if (word == "--nccl" && has_value) {
      library = argv[++i];
    } else if (word == "--cuda") {
      on_gpu = true;
      if (has_value) cuda = argv[++i];
    } else {
      std::fprintf(stderr, "usage: nccl_bench [--nccl PATH] [--cuda [PATH]]\n");
      return 2;
    }
  }
  const std::shared_ptr<const NcclLibrary> nccl = Get(LoadNccl(library));
  if (on_gpu) {
    Run(nccl, Get(OpenDevice("cuda", cuda)));
    return 0;
  }
  void* const handle = dlopen(nccl->path.c_str(), RTLD_NOW | RTLD_LOCAL);
  const auto controls = reinterpret_cast<FakeNccl* (*)()>(dlsym(handle, kFakeNcclSymbol));
  if (controls == nullptr) Fail(absl::InvalidArgumentError("NCCL itself requires --cuda"));
  controls()->queue = [](void* stream, void (*work)(void*), void* argument) {
    kernels::QueueOnHostDevice(stream, [=] { work(argument); });
  };
  Run(nccl, MakeDevice(kernels::HostDeviceApi(), 0, "host"));
  return 0;
}

}  // namespace
}  // namespace thinwire

int main(int argc, char** argv) { return thinwire::Main(argc, argv); }
