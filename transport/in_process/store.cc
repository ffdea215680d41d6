#include "transport/store.h"

#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "transport/time_left.h"

namespace thinwire {
namespace {

class InProcessStore final : public Store {
 public:
  absl::Status Set(std::string_view key, std::string_view value) override {
    const absl::MutexLock lock(&mu_);
    values_[std::string(key)] = std::string(value);
    changed_.SignalAll();
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Get(std::string_view key, Deadline deadline) override {
    const std::string name(key);
    const absl::MutexLock lock(&mu_);
    for (;;) {
      if (const auto found = values_.find(name); found != values_.end()) return found->second;
      if (Clock::now() >= deadline) break;
      changed_.WaitWithTimeout(&mu_, TimeLeft(deadline));
    }
    return absl::DeadlineExceededError(absl::StrCat("nobody set '", name, "' in time"));
  }

 private:
  absl::Mutex mu_;
  absl::CondVar changed_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

std::shared_ptr<Store> MakeInProcessStore() { return std::make_shared<InProcessStore>(); }

}  // namespace thinwire
