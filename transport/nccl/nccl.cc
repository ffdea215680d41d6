#include "transport/nccl/nccl.h"

#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compress/device.h"
#include "transport/nccl/nccl_comm.h"
#include "transport/nccl/nccl_driver.h"
#include "transport/nccl/nccl_library.h"

namespace thinwire {
namespace {

// State that the planes of one communicator share.
struct Shared {
  Shared(const Membership& members, std::shared_ptr<Device> device, std::unique_ptr<NcclComm> comm,
         std::unique_ptr<DeviceStream> stream)
      : members(members), device(std::move(device)), driver(std::move(comm), std::move(stream)) {}

  const Membership members;
  const std::shared_ptr<Device> device;
  std::atomic<uint64_t> bytes_sent{0};
  bool registers = false;  // all ranks register memory; set by Greet
  NcclDriver driver;
};

// Memory that NCCL allocates and that is registered with the communicator, so that NCCL does not
// copy blocks there to buffers of its own. It shares the driver, so that the communicator ends
// after all memory that is registered with it. NCCL's documentation forbids exchanges between
// registered and other memory: all ranks use this, or none.
//
// Unimplemented if the library is older than 2.19 or is configured not to register
// (NCCL_LOCAL_REGISTER=0); ResourceExhausted; Internal if NCCL refuses it.
absl::StatusOr<DeviceMemory> AllocateRegistered(std::shared_ptr<NcclDriver> driver, size_t bytes) {
  if (!driver->comm().nccl().registers()) {
    return absl::UnimplementedError("NCCL registers memory from version 2.19 on");
  }
  const absl::StatusOr<void*> memory = driver->comm().Allocate(bytes);
  if (!memory.ok()) return memory.status();
  absl::StatusOr<void*> registration = nullptr;
  if (!driver->Do([&](NcclComm& comm) { registration = comm.Register(*memory, bytes); })) {
    registration = driver->failure()->reason();
  } else if (registration.ok() && *registration == nullptr) {
    registration = absl::UnimplementedError("NCCL was set to register no memory");
  }
  if (!registration.ok()) {
    driver->comm().Free(*memory);
    return registration.status();
  }
  return DeviceMemory(static_cast<uint8_t*>(*memory),
                      [driver = std::move(driver), registration = *registration](uint8_t* memory) {
                        const bool lives =
                            driver->Do([&](NcclComm& comm) { comm.Deregister(registration); });
                        // Freeing waits for the device, and a kernel that never ends may still
                        // write.
                        if (lives || driver->comm().AwaitEnd()) driver->comm().Free(memory);
                      });
}

class NcclExchange final : public Exchange {
 public:
  NcclExchange(NcclDriver& driver, std::shared_ptr<NcclOp> op)
      : driver_(driver), op_(std::move(op)) {}
  ~NcclExchange() override {
    if (watched_) return;
    const auto flush =
        std::make_shared<NcclOp>(NcclOp::Kind::kFlush, op_->stream, op_->stream.Record());
    driver_.Begin(flush);
    driver_.failure()->Fail(
        absl::InternalError("an exchange was dropped before it was waited for"));
    driver_.Wait(*flush, Deadline::max()).IgnoreError();
  }

  absl::Status Wait(Deadline deadline) override {
    watched_ = true;
    return driver_.Wait(*op_, deadline);
  }
  void OnDone(std::function<void(absl::Status)> done) override {
    watched_ = true;
    driver_.OnDone(*op_, std::move(done));
  }

 private:
  NcclDriver& driver_;
  const std::shared_ptr<NcclOp> op_;
  bool watched_ = false;
};

class NcclData final : public StreamPlane {
 public:
  NcclData(std::shared_ptr<Shared> shared, DeviceStream& stream)
      : shared_(std::move(shared)), stream_(stream) {}

  const Membership& members() const override { return shared_->members; }
  DataTraits traits() const override {
    return {Matching::kByOrder, Completion::kEvents, Memory::kStream, shared_->registers};
  }

  std::unique_ptr<Exchange> Start(uint64_t, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override {
    if (status().ok()) {
      for (int to = 0; to < size(); ++to) {
        if (to != rank()) shared_->bytes_sent += send[to].size();
      }
    }
    const auto op = std::make_shared<NcclOp>(NcclOp::Kind::kExchange, stream_, stream_.Record());
    op->send.assign(send.begin(), send.end());
    op->recv.assign(recv.begin(), recv.end());
    return Begin(op);
  }

  std::unique_ptr<StreamPlane> On(DeviceStream& stream) override {
    return std::make_unique<NcclData>(shared_, stream);
  }
  std::unique_ptr<Exchange> Flush() override {
    return Begin(std::make_shared<NcclOp>(NcclOp::Kind::kFlush, stream_, stream_.Record()));
  }

  absl::StatusOr<DeviceMemory> Allocate(size_t bytes) override {
    return AllocateRegistered({shared_, &shared_->driver}, bytes);
  }

  const std::shared_ptr<Failure>& failure() const override { return shared_->driver.failure(); }
  uint64_t bytes_sent() const override { return shared_->bytes_sent; }

  // The first exchange: NCCL connects to its peers in it, and waits for them. It also tells the
  // ranks whether all of them can register memory.
  absl::Status Greet(Deadline deadline);

 private:
  std::unique_ptr<Exchange> Begin(std::shared_ptr<NcclOp> op) {
    shared_->driver.Begin(op);
    return std::make_unique<NcclExchange>(shared_->driver, std::move(op));
  }
  absl::StatusOr<bool> Greet(uint8_t* device, uint8_t* host, bool gather, bool registers,
                             Deadline deadline);

  const std::shared_ptr<Shared> shared_;
  DeviceStream& stream_;
};

constexpr size_t kGreeting = 16;         // bytes of one block
constexpr size_t kWhetherRegisters = 1;  // index of the byte that is 1 if the rank does

absl::Status NcclData::Greet(Deadline deadline) {
  const size_t bytes = 2 * size() * kGreeting;
  const absl::StatusOr<DeviceMemory> device = shared_->device->Allocate(bytes);
  if (!device.ok()) return device.status();
  const absl::StatusOr<DeviceMemory> host = shared_->device->AllocatePinned(bytes);
  if (!host.ok()) return host.status();
  shared_->driver.Keep(*device);
  shared_->driver.Keep(*host);
  bool all_register = Allocate(kGreeting).ok();
  for (const bool gather : {false, true}) {
    const absl::StatusOr<bool> all =
        Greet(device->get(), host->get(), gather, all_register, deadline);
    if (!all.ok()) return all.status();
    all_register = *all;
  }
  shared_->registers = all_register;
  shared_->bytes_sent = 0;
  return absl::OkStatus();
}

// Every rank sends its number and whether it registers memory, to each rank separately or as an
// all-gather, and checks what it receives. True if all ranks register.
absl::StatusOr<bool> NcclData::Greet(uint8_t* device, uint8_t* host, bool gather, bool registers,
                                     Deadline deadline) {
  const size_t half = size() * kGreeting;
  std::memset(host, rank(), 2 * half);
  for (int r = 0; r < 2 * size(); ++r) host[r * kGreeting + kWhetherRegisters] = registers;
  stream_.Copy(device, host, 2 * half);
  std::vector<Bytes> send;
  std::vector<MutableBytes> recv;
  for (int r = 0; r < size(); ++r) {
    recv.push_back({device + r * kGreeting, kGreeting});
    send.push_back(
        {gather ? device + rank() * kGreeting : device + half + r * kGreeting, kGreeting});
  }
  if (absl::Status bad = Start(0, send, recv)->Wait(deadline); !bad.ok()) return bad;
  stream_.Copy(host, device, half);
  if (absl::Status bad = Flush()->Wait(deadline); !bad.ok()) return bad;
  for (int r = 0; r < size(); ++r) {
    registers &= host[r * kGreeting + kWhetherRegisters] != 0;
    if (host[r * kGreeting] == r && host[(r + 1) * kGreeting - 1] == r) continue;
    return absl::UnimplementedError(
        absl::StrCat("NCCL gave rank ", rank(), " other bytes than rank ", r, " sent, expected ", r,
                     ", got ", host[r * kGreeting], "; set transport to gloo"));
  }
  return registers;
}

// Rank 0 makes the id for all. A rank without the library passes the reason, so that the others do
// not wait for it.
absl::StatusOr<std::string> MakeId(const NcclOptions& options,
                                   const absl::StatusOr<std::shared_ptr<const NcclLibrary>>& nccl) {
  if (!nccl.ok()) return nccl.status();
  if (options.members.rank != 0) return std::string();
  NcclUniqueId id;
  const NcclResult result = (*nccl)->get_unique_id(&id);
  if (result == kNcclOk) return std::string(id.bytes, sizeof(id.bytes));
  return absl::UnimplementedError(absl::StrCat(
      "NCCL ", (*nccl)->version, " gave no unique id: ", (*nccl)->get_error_string(result), " (",
      (*nccl)->get_last_error(nullptr), ")"));
}

absl::StatusOr<NcclUniqueId> IdIn(const std::string& answer) {
  NcclUniqueId id;
  if (answer.size() != sizeof(id.bytes)) {
    return absl::UnimplementedError(absl::StrCat("rank 0 gave a unique id of ", answer.size(),
                                                 " bytes, expected ", sizeof(id.bytes),
                                                 "; use the same version on every rank"));
  }
  std::memcpy(id.bytes, answer.data(), sizeof(id.bytes));
  return id;
}

}  // namespace

absl::StatusOr<std::string> NcclVersion(const std::string& library) {
  const absl::StatusOr<std::shared_ptr<const NcclLibrary>> nccl = LoadNccl(library);
  if (!nccl.ok()) return nccl.status();
  return (*nccl)->version;
}

absl::StatusOr<std::unique_ptr<StreamPlane>> ConnectNccl(const NcclOptions& options) {
  const absl::StatusOr<std::shared_ptr<const NcclLibrary>> nccl = LoadNccl(options.library);
  const absl::StatusOr<std::vector<std::string>> ids = options.tell(MakeId(options, nccl));
  if (!ids.ok()) return ids.status();
  const absl::StatusOr<NcclUniqueId> id = IdIn(ids->front());
  if (!id.ok()) return id.status();
  return JoinNccl(*nccl, options.members, *id, options.device, options.deadline, &options.control,
                  options.most_ctas);
}

absl::StatusOr<std::unique_ptr<StreamPlane>> JoinNccl(std::shared_ptr<const NcclLibrary> nccl,
                                                      Membership members, const NcclUniqueId& id,
                                                      std::shared_ptr<Device> device,
                                                      Deadline deadline,
                                                      const ControlPlane* control, int most_ctas) {
  absl::StatusOr<std::unique_ptr<DeviceStream>> stream = device->MakeStream();
  if (!stream.ok()) return stream.status();
  absl::StatusOr<std::unique_ptr<NcclComm>> comm =
      NcclComm::Make(std::move(nccl), members, id, device, deadline, control, most_ctas);
  if (!comm.ok()) return comm.status();
  DeviceStream& own = **stream;
  const auto shared =
      std::make_shared<Shared>(members, std::move(device), *std::move(comm), *std::move(stream));
  auto plane = std::make_unique<NcclData>(shared, own);
  Failure::Listener hears_of_lost_peers;
  if (control != nullptr) {
    hears_of_lost_peers = control->failure()->PassOn(plane->failure());
  }
  if (absl::Status bad = plane->Greet(deadline); !bad.ok()) return bad;
  return plane;
}

}  // namespace thinwire
