#include "integrations/c/communicator.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "integrations/c/callback_store.h"
#include "integrations/c/options.h"
#include "integrations/c/text.h"
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

}  // namespace thinwire
