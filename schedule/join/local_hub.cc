#include "schedule/join/local_hub.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/in_process/in_process.h"

namespace thinwire {

std::shared_ptr<LocalHub> LocalHub::Of(const std::string& name, int size) {
  static absl::Mutex mu(absl::kConstInit);
  static std::map<std::pair<std::string, int>, std::weak_ptr<LocalHub>> hubs;
  const absl::MutexLock lock(&mu);
  std::erase_if(hubs, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<LocalHub>& place = hubs[{name, size}];
  std::shared_ptr<LocalHub> hub = place.lock();
  if (hub == nullptr) place = hub = std::make_shared<LocalHub>(size);
  return hub;
}

LocalHub::LocalHub(int size)
    : store_(MakeInProcessStore()), transports_(MakeInProcessTransports(size)) {}

absl::StatusOr<Transport> LocalHub::Connect(int rank) {
  const absl::MutexLock lock(&mu_);
  if (!transports_[rank].empty()) return std::move(transports_[rank]);
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", rank, " of this local group is connected already; destroy the group's ",
                   "communicators first, or use another name"));
}

}  // namespace thinwire
