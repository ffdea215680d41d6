#include "transport/mesh/group_key.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/mesh/descriptor.h"

namespace thinwire {
namespace {

constexpr size_t kLeastBytes = 16, kMostBytes = 4096;

absl::Status Bad(const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("the key file '", path, "' ", what));
}

// `file` is from the open file, so that it can't be replaced in between.
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

// OpenSSL is linked statically, so this initialises our own copy: it reads no openssl.cnf, which
// could name modules that do not fit, and registers no atexit handler.
std::string HmacSha256(std::string_view key, std::string_view text) {
  OPENSSL_init_crypto(OPENSSL_INIT_NO_LOAD_CONFIG | OPENSSL_INIT_NO_ATEXIT, nullptr);
  std::string mac(kMacBytes, '\0');
  unsigned length = 0;
  const bool done = HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                         reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                         reinterpret_cast<unsigned char*>(mac.data()), &length) != nullptr;
  return done && length == mac.size() ? mac : "";
}

bool SameBytes(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

// getrandom fails only if a signal arrives before the kernel's generator is ready.
std::string RandomBytes(size_t count) {
  std::string bytes(count, '\0');
  for (size_t have = 0; have < count;) {
    const ssize_t got = getrandom(bytes.data() + have, count - have, 0);
    have += static_cast<size_t>(std::max<ssize_t>(got, 0));
  }
  return bytes;
}

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
