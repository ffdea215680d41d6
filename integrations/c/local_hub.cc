#include "integrations/c/local_hub.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/in_process.h"

namespace thinwire {

std::shared_ptr<LocalHub> LocalHub::Of(const std::string& name, int size) {
  static std::mutex mu;
  static std::map<std::pair<std::string, int>, std::weak_ptr<LocalHub>> hubs;
  const std::lock_guard lock(mu);
  std::erase_if(hubs, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<LocalHub>& place = hubs[{name, size}];
  std::shared_ptr<LocalHub> hub = place.lock();
  if (hub == nullptr) place = hub = std::make_shared<LocalHub>(size);
  return hub;
}

LocalHub::LocalHub(int size)
    : store_(MakeInProcessStore()), transports_(MakeInProcessTransports(size)) {}

absl::StatusOr<std::unique_ptr<Transport>> LocalHub::Connect(int rank) {
  const std::lock_guard lock(mu_);
  if (transports_[rank] != nullptr) return std::move(transports_[rank]);
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", rank, " of this local group is connected already; destroy the group's ",
                   "communicators first, or use another name"));
}

}  // namespace thinwire
