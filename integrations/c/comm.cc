// tw_options_init, tw_comm_*; how options become an engine.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "integrations/c/border.h"
#include "integrations/c/options.h"
#include "kernels/device.h"
#include "schedule/engine/records.h"
#include "schedule/join/join.h"
#include "transport/nccl/nccl.h"
#include "transport/ucx/ucx.h"

namespace thinwire {
namespace {

// Sets rank, size, group and the place where the ranks meet: the first that the caller has set of
// store, local_group and store_path.
absl::Status SetPlace(const tw_options& in, JoinOptions& out) {
  out.rank = in.rank;
  out.size = in.size;
  out.group = std::string(TextOf(in.group));
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

// Returns null for the host.
absl::StatusOr<std::shared_ptr<Device>> DeviceOf(const tw_options& in) {
  const std::string name = std::string(TextOf(in.device));
  if (name.empty() || name == "cpu") return std::shared_ptr<Device>();
  absl::StatusOr<std::shared_ptr<Device>> device =
      OpenDevice(name, std::string(TextOf(in.cuda_library)));
  if (device.ok()) return device;
  return absl::Status(device.status().code(),
                      absl::StrCat("rank ", in.rank, ": ", device.status().message()));
}

// Sets all fields of `out` but those of SetPlace().
absl::Status Parse(const tw_options& in, JoinOptions& out) {
  if (in.size < 1 || in.rank < 0 || in.rank >= in.size || in.timeout_ms < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", in.rank, " of ", in.size, ", timeout ", in.timeout_ms,
                     " ms: expected 0 <= rank < size and a timeout that is not negative"));
  }
  absl::StatusOr<Options> options = ParseOptions(in);
  if (!options.ok()) return options.status();
  if (absl::Status bad = CheckOptions(*options); !bad.ok()) return bad;
  for (const auto& [setting, path] : {std::pair("trace_path", options->trace_path),
                                      std::pair("flight_path", options->flight_path)}) {
    if (absl::Status bad = CheckPathOfRank(setting, path, in.rank); !bad.ok()) return bad;
  }
  absl::StatusOr<std::shared_ptr<Device>> device = DeviceOf(in);
  if (!device.ok()) return device.status();
  out.options = *std::move(options);
  out.device = *std::move(device);
  out.interface = std::string(TextOf(in.interface_name));
  out.rendezvous_host = std::string(TextOf(in.rendezvous_host));
  out.key_file = std::string(TextOf(in.key_file));
  out.congestion = std::string(TextOf(in.congestion));
  out.ucx_library = std::string(TextOf(in.ucx_library));
  out.nccl_library = std::string(TextOf(in.nccl_library));
  return absl::OkStatus();
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
  // Larger than any value that ranks store. The longest is a handshake's, which names all codecs.
  static constexpr size_t kCapacity = size_t{1} << 20;

  static int Remaining(Deadline deadline) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    return static_cast<int>(std::clamp<int64_t>(left.count(), 1, std::numeric_limits<int>::max()));
  }

  const tw_store callbacks_;
};

// Parses the options, compares them with the other ranks' options, and connects.
absl::StatusOr<std::unique_ptr<tw_comm>> MakeCommunicator(const tw_options& in) {
  JoinOptions options;
  const absl::Status no_place = SetPlace(in, options);
  if (absl::Status bad = Parse(in, options); !bad.ok()) return FailToJoin(options, std::move(bad));
  if (!no_place.ok()) return no_place;
  absl::StatusOr<Joined> joined = Join(options);
  if (!joined.ok()) return joined.status();
  const Transport& transport = joined->transport;
  const bool by_order =
      !transport.empty() && transport.data->traits().matching == Matching::kByOrder;
  absl::StatusOr<std::unique_ptr<Engine>> engine =
      Engine::Create(joined->options, std::move(joined->transport), options.device);
  if (!engine.ok()) return engine.status();
  return std::make_unique<tw_comm>(tw_comm{in.rank, in.size, options.device != nullptr,
                                           joined->words, by_order, joined->topology,
                                           NodesFound(*joined), *std::move(engine)});
}

}  // namespace

std::shared_ptr<Store> MakeCallbackStore(const tw_store& callbacks) {
  return std::make_shared<CallbackStore>(callbacks);
}

}  // namespace thinwire

using thinwire::ToC;

extern "C" {

void tw_options_init_sized(tw_options* options, size_t struct_size) {
  if (options == nullptr) return;
  std::memset(options, 0, struct_size);
  // tw_comm_create refuses a struct that is too small for the first release's fields.
  if (struct_size < thinwire::kFirstOptionsSize) return;
  options->struct_size = struct_size;
  options->size = 1;
}

// The parentheses keep the header's macro from being expanded.
void(tw_options_init)(tw_options* options) {
  tw_options_init_sized(options, thinwire::kFirstOptionsSize);
}

tw_status tw_comm_create(const tw_options* options, tw_comm** comm) {
  if (options == nullptr || comm == nullptr) {
    return ToC(absl::InvalidArgumentError("tw_comm_create got a null pointer"));
  }
  *comm = nullptr;
  const absl::StatusOr<tw_options> read = thinwire::ReadOptions(options);
  if (!read.ok()) return ToC(read.status());
  absl::StatusOr<std::unique_ptr<tw_comm>> made = thinwire::MakeCommunicator(*read);
  if (made.ok()) *comm = made->release();
  return ToC(made.status());
}

tw_status tw_comm_abort(tw_comm* comm) {
  if (absl::Status bad = thinwire::CheckComm("tw_comm_abort", comm); !bad.ok()) return ToC(bad);
  comm->engine->Abort(absl::AbortedError(absl::StrCat("rank ", comm->rank, " aborted the group")));
  return TW_OK;
}

tw_status tw_comm_fail(tw_comm* comm, tw_status status, const char* reason) {
  if (absl::Status bad = thinwire::CheckComm("tw_comm_fail", comm, {reason}); !bad.ok()) {
    return ToC(bad);
  }
  if (status == TW_OK) {
    return ToC(
        absl::InvalidArgumentError("tw_comm_fail got TW_OK, expected the status of a failure"));
  }
  comm->engine->Abort(thinwire::FromC(status, reason));
  return TW_OK;
}

void tw_comm_destroy(tw_comm* comm) {
  // In a forked child a goodbye would end the parent's connections, and the threads to join are
  // missing.
  if (comm != nullptr && thinwire::IsHome(comm->home)) delete comm;
}

tw_status tw_comm_describe(tw_comm* comm, char* text, size_t capacity, size_t* bytes) {
  const void* const room = capacity == 0 ? bytes : static_cast<const void*>(text);
  if (absl::Status bad = thinwire::CheckComm("tw_comm_describe", comm, {bytes, room}); !bad.ok()) {
    return ToC(bad);
  }
  const std::string described =
      absl::StrCat("transport: ", comm->transport, "\ntopology: ", comm->topology, "\n",
                   comm->engine->Describe());
  *bytes = described.size() + 1;
  if (capacity == 0) return TW_OK;
  const size_t written = std::min(capacity - 1, described.size());
  std::memcpy(text, described.data(), written);
  text[written] = '\0';
  return TW_OK;
}

tw_status tw_comm_transport(tw_comm* comm, char* text, size_t capacity) {
  if (absl::Status bad = thinwire::CheckComm("tw_comm_transport", comm, {text}); !bad.ok()) {
    return ToC(bad);
  }
  return ToC(thinwire::WriteText("the transport", comm->transport, text, capacity));
}

tw_status tw_comm_matches_by_order(tw_comm* comm, int* by_order) {
  if (absl::Status bad = thinwire::CheckComm("tw_comm_matches_by_order", comm, {by_order});
      !bad.ok()) {
    return ToC(bad);
  }
  *by_order = comm->matches_by_order ? 1 : 0;
  return TW_OK;
}

tw_status tw_comm_topology(tw_comm* comm, char* text, size_t capacity) {
  if (absl::Status bad = thinwire::CheckComm("tw_comm_topology", comm, {text}); !bad.ok()) {
    return ToC(bad);
  }
  return ToC(thinwire::WriteText("the topology", comm->topology, text, capacity));
}

tw_status tw_comm_nodes(tw_comm* comm, tw_nodes* nodes) {
  if (absl::Status bad = thinwire::CheckComm("tw_comm_nodes", comm, {nodes}); !bad.ok()) {
    return ToC(bad);
  }
  *nodes = comm->nodes;
  return TW_OK;
}

tw_status tw_ucx_version(const char* library, char* text, size_t capacity) {
  if (text == nullptr) return ToC(absl::InvalidArgumentError("the place for the version is null"));
  const absl::StatusOr<std::string> version =
      thinwire::UcxVersion(std::string(thinwire::TextOf(library)));
  if (!version.ok()) return ToC(version.status());
  return ToC(thinwire::WriteText("the version", *version, text, capacity));
}

tw_status tw_nccl_version(const char* library, char* text, size_t capacity) {
  if (text == nullptr) return ToC(absl::InvalidArgumentError("the place for the version is null"));
  const absl::StatusOr<std::string> version =
      thinwire::NcclVersion(std::string(thinwire::TextOf(library)));
  if (!version.ok()) return ToC(version.status());
  return ToC(thinwire::WriteText("the version", *version, text, capacity));
}

tw_status tw_cuda_device_count(const char* cuda_library, int* count) {
  if (count == nullptr) return ToC(absl::InvalidArgumentError("the place for the count is null"));
  const absl::StatusOr<int> found =
      thinwire::CountDevices(std::string(thinwire::TextOf(cuda_library)));
  *count = found.value_or(0);
  return ToC(found.status());
}

}  // extern "C"
