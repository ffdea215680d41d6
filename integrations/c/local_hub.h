// LocalHub: where communicators of one process, on one thread each, find each other by a name.
#ifndef THINWIRE_INTEGRATIONS_C_LOCAL_HUB_H_
#define THINWIRE_INTEGRATIONS_C_LOCAL_HUB_H_

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/store.h"
#include "transport/transport.h"

namespace thinwire {

class LocalHub {
 public:
  // The hub of that name and size, made by whoever comes first. It is gone when nobody holds it, so
  // that the name can be used again.
  static std::shared_ptr<LocalHub> Of(const std::string& name, int size);

  explicit LocalHub(int size);

  const std::shared_ptr<Store>& store() const { return store_; }

  // The transport of a rank. InvalidArgument if that rank is connected already.
  absl::StatusOr<std::unique_ptr<Transport>> Connect(int rank);

 private:
  const std::shared_ptr<Store> store_;
  std::mutex mu_;
  std::vector<std::unique_ptr<Transport>> transports_;
};

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_C_LOCAL_HUB_H_
