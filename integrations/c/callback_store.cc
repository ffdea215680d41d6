#include "integrations/c/callback_store.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

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
  // More than any value of ours: the longest is a handshake's, which names all codecs.
  static constexpr size_t kCapacity = size_t{1} << 20;

  static int Remaining(Deadline deadline) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    return static_cast<int>(std::clamp<int64_t>(left.count(), 1, std::numeric_limits<int>::max()));
  }

  const tw_store callbacks_;
};

}  // namespace

std::shared_ptr<Store> MakeCallbackStore(const tw_store& callbacks) {
  return std::make_shared<CallbackStore>(callbacks);
}

}  // namespace thinwire
