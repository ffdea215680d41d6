#include "transport/mesh/group_key.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/mesh/descriptor.h"
#include "transport/mesh/hmac.h"

namespace thinwire {
namespace {

constexpr size_t kLeastBytes = 16, kMostBytes = 4096;

absl::Status Bad(const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("the key file '", path, "' ", what));
}

// `file` is the open file's, so that nobody can exchange it in between.
absl::Status CheckAccess(const std::string& path, const struct stat& file) {
  if (!S_ISREG(file.st_mode)) return Bad(path, "is no regular file");
  if (file.st_uid != geteuid() && file.st_uid != 0) {
    return Bad(path, absl::StrCat("belongs to user ", file.st_uid, ", expected user ", geteuid(),
                                  " or root; a key of somebody else's is no secret"));
  }
  if ((file.st_mode & 077) != 0) {
    return Bad(path, absl::StrFormat("can be reached by other users (its mode is %04o), expected "
                                     "0600; run chmod 600 on it",
                                     file.st_mode & 07777));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> ReadKeyFile(const std::string& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat about {};
  if (!file.valid() || fstat(file.fd(), &about) != 0) {
    return Bad(path, absl::StrCat("can't be read: ", std::strerror(errno)));
  }
  if (absl::Status bad = CheckAccess(path, about); !bad.ok()) return bad;
  std::string key(kMostBytes + 1, '\0');
  const ssize_t got = read(file.fd(), key.data(), key.size());
  if (got < 0) return Bad(path, absl::StrCat("can't be read: ", std::strerror(errno)));
  key.resize(static_cast<size_t>(got));
  while (!key.empty() && (key.back() == '\n' || key.back() == '\r')) key.pop_back();
  if (key.size() < kLeastBytes || key.size() > kMostBytes) {
    return Bad(path, absl::StrCat("has ", got, " bytes, expected ", kLeastBytes, " to ", kMostBytes,
                                  "; make one with: openssl rand -hex 32"));
  }
  return key;
}

std::string MakeToken() { return absl::BytesToHexString(RandomBytes(32)); }

GroupKey::GroupKey(std::string_view secret, std::string_view token)
    : from_file_(!secret.empty()),
      key_(HmacSha256(secret, absl::StrCat("thinwire group ", std::string(token)))) {}

std::string GroupKey::Mac(std::string_view text) const { return HmacSha256(key_, text); }

std::string GroupKey::fingerprint() const {
  return absl::StrCat(from_file_ ? "file-" : "token-",
                      absl::BytesToHexString(Mac("fingerprint")).substr(0, 16));
}

}  // namespace thinwire
