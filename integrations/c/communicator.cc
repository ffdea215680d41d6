#include "integrations/c/communicator.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "integrations/c/options.h"
#include "integrations/c/status.h"
#include "kernels/device.h"
#include "schedule/join/join.h"

namespace thinwire {
namespace {

// The one of three places that the caller set.
absl::Status SetPlace(const tw_options& in, JoinOptions& out) {
  if (in.store.set != nullptr && in.store.get != nullptr) {
    out.store = MakeCallbackStore(in.store);
  } else if (in.local_group != nullptr) {
    out.local_group = in.local_group;
  } else if (in.store_path != nullptr) {
    out.store = MakeFileStore(in.store_path);
  } else if (in.size > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", in.rank, " got no place to meet its ", in.size - 1,
                     " peers at; set options.store, options.store_path or options.local_group"));
  }
  return absl::OkStatus();
}

// Null for the host.
absl::StatusOr<std::shared_ptr<Device>> DeviceOf(const tw_options& in) {
  const std::string name = std::string(TextOf(in.device));
  if (name.empty() || name == "cpu") return std::shared_ptr<Device>();
  absl::StatusOr<std::shared_ptr<Device>> device =
      OpenDevice(name, std::string(TextOf(in.cuda_library)));
  if (device.ok()) return device;
  return absl::Status(device.status().code(),
                      absl::StrCat("rank ", in.rank, ": ", device.status().message()));
}

absl::StatusOr<JoinOptions> Parse(const tw_options& in) {
  if (in.size < 1 || in.rank < 0 || in.rank >= in.size || in.timeout_ms < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", in.rank, " of ", in.size, ", timeout ", in.timeout_ms,
                     " ms: expected 0 <= rank < size and a timeout that is not negative"));
  }
  absl::StatusOr<Options> options = ParseOptions(in);
  if (!options.ok()) return options.status();
  if (absl::Status bad = CheckOptions(*options); !bad.ok()) return bad;
  absl::StatusOr<std::shared_ptr<Device>> device = DeviceOf(in);
  if (!device.ok()) return device.status();
  JoinOptions out{.rank = in.rank,
                  .size = in.size,
                  .options = *std::move(options),
                  .store = nullptr,
                  .local_group = {},
                  .group = std::string(TextOf(in.group)),
                  .device = *std::move(device),
                  .interface = std::string(TextOf(in.interface_name)),
                  .rendezvous_host = std::string(TextOf(in.rendezvous_host)),
                  .key_file = std::string(TextOf(in.key_file)),
                  .congestion = std::string(TextOf(in.congestion)),
                  .ucx_library = std::string(TextOf(in.ucx_library)),
                  .nccl_library = std::string(TextOf(in.nccl_library))};
  if (absl::Status bad = SetPlace(in, out); !bad.ok()) return bad;
  return out;
}

tw_nodes NodesFound(const Joined& joined) {
  if (!joined.rates.has_value()) return {};
  return {static_cast<size_t>(joined.nodes.local_size), joined.rates->inside,
          joined.rates->between};
}

class CallbackStore final : public Store {
 public:
  explicit CallbackStore(const tw_store& callbacks) : callbacks_(callbacks) {}

  absl::Status Set(std::string_view key, std::string_view value) override {
    const std::string name(key);
    if (callbacks_.set(callbacks_.context, name.c_str(), value.data(), value.size()) == 0) {
      return absl::OkStatus();
    }
    return absl::UnavailableError(absl::StrCat("the rendezvous store refused key '", name, "'"));
  }

  absl::StatusOr<std::string> Get(std::string_view key, Deadline deadline) override {
    const std::string name(key);
    std::string value(kCapacity, '\0');
    size_t bytes = 0;
    if (callbacks_.get(callbacks_.context, name.c_str(), value.data(), value.size(), &bytes,
                       Remaining(deadline)) != 0) {
      return absl::DeadlineExceededError(
          absl::StrCat("nobody set '", name, "' in the rendezvous store in time"));
    }
    if (bytes > value.size()) {
      return absl::InternalError(absl::StrCat("the value of '", name, "' has ", bytes,
                                              " bytes, expected at most ", value.size()));
    }
    value.resize(bytes);
    return value;
  }

 private:
  // More than any value of ours: the longest is a handshake's, which names all codecs.
  static constexpr size_t kCapacity = size_t{1} << 20;

  static int Remaining(Deadline deadline) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    return static_cast<int>(std::clamp<int64_t>(left.count(), 1, std::numeric_limits<int>::max()));
  }

  const tw_store callbacks_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<tw_comm>> MakeCommunicator(const tw_options& in) {
  const absl::StatusOr<JoinOptions> options = Parse(in);
  if (!options.ok()) return options.status();
  absl::StatusOr<Joined> joined = Join(*options);
  if (!joined.ok()) return joined.status();
  absl::StatusOr<std::unique_ptr<Engine>> engine =
      Engine::Create(joined->options, std::move(joined->transport), options->device);
  if (!engine.ok()) return engine.status();
  return std::make_unique<tw_comm>(tw_comm{in.rank,
                                           in.size,
                                           options->device != nullptr,
                                           joined->words,
                                           joined->topology,
                                           NodesFound(*joined),
                                           *std::move(engine),
                                           {}});
}

std::shared_ptr<Store> MakeCallbackStore(const tw_store& callbacks) {
  return std::make_shared<CallbackStore>(callbacks);
}

absl::Status CheckComm(const char* function, const tw_comm* comm,
                       std::initializer_list<const void*> pointers) {
  const auto is_null = [](const void* pointer) { return pointer == nullptr; };
  if (comm == nullptr || std::any_of(pointers.begin(), pointers.end(), is_null)) {
    return absl::InvalidArgumentError(absl::StrCat(function, " got a null pointer"));
  }
  return comm->home.Check();
}

absl::Status CheckCall(const tw_comm* comm, tw_dtype dtype, tw_op op, const void* stream) {
  if (comm == nullptr) return absl::InvalidArgumentError("the communicator is null");
  if (absl::Status bad = comm->home.Check(); !bad.ok()) return bad;
  if (dtype != TW_F32 && dtype != TW_BF16 && dtype != TW_F16) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", comm->rank, ": dtype ", static_cast<int>(dtype),
                     " is unknown, expected TW_F32, TW_BF16 or TW_F16"));
  }
  if (op != TW_MEAN && op != TW_SUM) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", comm->rank, ": op ",
                                                   static_cast<int>(op),
                                                   " is unknown, expected TW_MEAN or TW_SUM"));
  }
  if (stream != nullptr && !comm->on_device) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", comm->rank, ": a stream was given, expected null, since this ",
                     "communicator is the host's; make one with options.device = \"cuda\""));
  }
  return absl::OkStatus();
}

CallSegments SegmentsOf(const tw_segment* segments, size_t count) {
  CallSegments call;
  for (size_t i = 0; i < count; ++i) {
    const tw_segment& s = segments[i];
    call.segments.push_back(
        {.name = std::string(TextOf(s.name)),
         .offset = s.offset,
         .count = s.count,
         .total = s.total,
         .codec = static_cast<uint32_t>(std::min<size_t>(s.codec, UINT32_MAX))});
    if (s.absent != 0) call.absent.push_back(static_cast<uint32_t>(i));
  }
  return call;
}

}  // namespace thinwire
