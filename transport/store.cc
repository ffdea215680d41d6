#include "transport/store.h"

#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "transport/steady_cond_var.h"

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
      changed_.WaitUntil(&mu_, deadline);
    }
    return absl::DeadlineExceededError(absl::StrCat("nobody set '", name, "' in time"));
  }

 private:
  absl::Mutex mu_;
  SteadyCondVar changed_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mu_);
};

class FileStore final : public Store {
 public:
  explicit FileStore(std::string folder) : folder_(std::move(folder)) {}

  absl::Status Set(std::string_view key, std::string_view value) override {
    const std::filesystem::path path = PathOf(key);
    const std::filesystem::path draft = absl::StrCat(path.string(), ".", getpid());
    std::error_code error;
    std::filesystem::create_directories(folder_, error);
    errno = 0;
    std::ofstream file(draft, std::ios::binary);
    file << value;
    file.close();
    if (file.fail()) {  // a full disk, or no descriptor left: nobody may read half a value
      error = {errno != 0 ? errno : EIO, std::generic_category()};
      unlink(draft.c_str());
    } else {
      std::filesystem::rename(draft, path, error);
    }
    if (!error) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("cannot write the rendezvous file ", path.string(),
                                               ": ", error.message(),
                                               "; is the folder there and writable?"));
  }

  // Polls: a shared folder may be on a network file system, which sends no notifications.
  absl::StatusOr<std::string> Get(std::string_view key, Deadline deadline) override {
    const std::filesystem::path path = PathOf(key);
    for (;;) {
      if (std::ifstream file(path, std::ios::binary); file) {
        std::ostringstream value;
        value << file.rdbuf();
        return std::move(value).str();
      }
      if (Clock::now() >= deadline) {
        return absl::DeadlineExceededError(
            absl::StrCat("nobody wrote ", path.string(), " in time"));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

 private:
  // Keys contain slashes; file names must not.
  std::filesystem::path PathOf(std::string_view key) const {
    std::string name(key);
    for (char& c : name) c = c == '/' ? '_' : c;
    return std::filesystem::path(folder_) / name;
  }

  const std::string folder_;
};

constexpr char kFailed[] = "failed: ";  // no handshake, token or hello begins like this

}  // namespace

absl::Status SetFailure(Store& store, std::string_view key, absl::Status why) {
  store.Set(key, absl::StrCat(kFailed, why.message())).IgnoreError();
  return why;
}

absl::StatusOr<std::string> GetOfPeer(Store& store, std::string_view key, int peer,
                                      const Membership& self, Deadline deadline) {
  absl::StatusOr<std::string> value = store.Get(key, deadline);
  if (!value.ok() || !absl::StartsWith(*value, kFailed)) return value;
  return absl::UnavailableError(absl::StrCat(
      "rank ", self.rank, " of ", self.size, " could not connect, since rank ", peer, " ", *value,
      "; if that was an earlier run, use a fresh rendezvous store, or another group name"));
}

std::shared_ptr<Store> MakeInProcessStore() { return std::make_shared<InProcessStore>(); }

std::shared_ptr<Store> MakeFileStore(std::string folder) {
  return std::make_shared<FileStore>(std::move(folder));
}

}  // namespace thinwire
