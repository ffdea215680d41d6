// WatchedStore: a store whose waits end when a group that is connected already has failed.
#ifndef THINWIRE_TRANSPORT_WATCHED_STORE_H_
#define THINWIRE_TRANSPORT_WATCHED_STORE_H_

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "transport/control_plane.h"
#include "transport/store.h"

namespace thinwire {

// A store does not tell who died; the group's connections do. So who waits there for a rank looks
// at them every now and then.
class WatchedStore final : public Store {
 public:
  // `group` must outlive it.
  WatchedStore(std::shared_ptr<Store> store, const ControlPlane& group)
      : store_(std::move(store)), group_(group) {}

  absl::Status Set(std::string_view key, std::string_view value) override {
    return store_->Set(key, value);
  }

  // The group's failure, if that comes first.
  absl::StatusOr<std::string> Get(std::string_view key, Deadline deadline) override {
    for (;;) {
      const Deadline next = std::min(deadline, Clock::now() + kGlance);
      absl::StatusOr<std::string> value = store_->Get(key, next);
      if (value.ok() || !absl::IsDeadlineExceeded(value.status())) return value;
      if (absl::Status failed = group_.status(); !failed.ok()) return failed;
      if (Clock::now() >= deadline) return value;
    }
  }

 private:
  static constexpr std::chrono::milliseconds kGlance{50};

  const std::shared_ptr<Store> store_;
  const ControlPlane& group_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_WATCHED_STORE_H_
