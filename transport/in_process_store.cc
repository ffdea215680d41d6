#include <condition_variable>
#include <map>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "transport/store.h"

namespace thinwire {
namespace {

class InProcessStore final : public Store {
 public:
  absl::Status Set(std::string_view key, std::string_view value) override {
    {
      const std::lock_guard lock(mu_);
      values_[std::string(key)] = std::string(value);
    }
    changed_.notify_all();
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Get(std::string_view key, Deadline deadline) override {
    const std::string name(key);
    std::unique_lock lock(mu_);
    if (changed_.wait_until(lock, deadline, [&] { return values_.count(name) > 0; }))
      return values_[name];
    return absl::DeadlineExceededError(absl::StrCat("nobody set '", name, "' in time"));
  }

 private:
  std::mutex mu_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

}  // namespace

std::shared_ptr<Store> MakeInProcessStore() { return std::make_shared<InProcessStore>(); }

}  // namespace thinwire
