#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "schedule/collective/settle.h"
#include "schedule/engine.h"
#include "schedule/engine/bucket.h"
#include "schedule/engine/checks.h"
#include "schedule/engine/group.h"
#include "transport/checked/checked.h"

namespace thinwire {
namespace {

// A data plane of device memory has no use for tensors of the host, nor for checksums, which a
// processor makes.
absl::Status CheckMemory(const Options& options, const Transport& transport, const Device* device) {
  if (transport.empty() || transport.data->traits().memory == Memory::kHost) {
    return absl::OkStatus();
  }
  if (device == nullptr) {
    return absl::InvalidArgumentError(
        "this transport moves a device's memory, expected tensors on one, got tensors on the host; "
        "set transport to gloo, or the device");
  }
  if (options.checksum) {
    return absl::UnimplementedError(
        "checksum is on, but this transport moves a device's memory, which no processor sees; "
        "set transport to gloo, or checksum off");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const Settled& settled, Transport transport,
                                                       std::shared_ptr<Device> device) {
  const Options& options = *settled;
  if (absl::Status bad = CheckOptions(options); !bad.ok()) return bad;
  const int size = transport.empty() ? 1 : transport.members().size;
  if (size != settled.world()) {
    return absl::InvalidArgumentError(absl::StrCat("options of a group of ", settled.world(),
                                                   " ranks with a transport of ", size));
  }
  if (size == 1) transport.Reset();
  if (absl::Status bad = CheckMemory(options, transport, device.get()); !bad.ok()) return bad;
  if (options.checksum && size > 1) {
    transport.data = std::make_unique<Checked>(std::move(transport.data));
  }
  if (device != nullptr && size > 1) {
    if (absl::Status bad = CheckKernels(options, *device); !bad.ok()) return bad;
  }
  auto group = std::make_unique<Group>(options, std::move(transport), std::move(device));
  if (absl::Status failed = group->StartThreads(); !failed.ok()) return failed;
  return group;
}

absl::StatusOr<std::shared_ptr<Work>> Engine::Start(const CollectiveRequest& request) {
  if (request.input.numel == 0 && request.output.numel == 0) return DoneWork();
  const absl::StatusOr<std::shared_ptr<const Bucket>> bucket = Register(request.bucket());
  if (!bucket.ok()) return bucket.status();
  return Submit(*bucket, request.submission());
}

}  // namespace thinwire
