// LocalHub: where ranks that are threads of one process find each other by a name.
#ifndef THINWIRE_SCHEDULE_JOIN_LOCAL_HUB_H_
#define THINWIRE_SCHEDULE_JOIN_LOCAL_HUB_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "transport/planes.h"
#include "transport/store.h"

namespace thinwire {

class LocalHub {
 public:
  // The hub of that name and size, made by whoever comes first. It is gone when nobody holds it, so
  // that the name can be used again.
  static std::shared_ptr<LocalHub> Of(const std::string& name, int size);

  explicit LocalHub(int size);

  const std::shared_ptr<Store>& store() const { return store_; }

  // The transport of a rank. InvalidArgument if that rank is connected already.
  absl::StatusOr<Transport> Connect(int rank);

 private:
  const std::shared_ptr<Store> store_;
  absl::Mutex mu_;
  std::vector<Transport> transports_ ABSL_GUARDED_BY(mu_);  // empty where a rank took its own
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_JOIN_LOCAL_HUB_H_
