#include "transport/mesh/hmac.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <algorithm>
#include <cstdint>

namespace thinwire {

// OpenSSL is linked in statically, so this initialises our own copy: it reads no openssl.cnf, which
// could name modules that do not fit, and leaves no handler for the end of the process.
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

// getrandom fails only by a signal before the kernel's generator is ready.
std::string RandomBytes(size_t count) {
  std::string bytes(count, '\0');
  for (size_t have = 0; have < count;) {
    const ssize_t got = getrandom(bytes.data() + have, count - have, 0);
    have += static_cast<size_t>(std::max<ssize_t>(got, 0));
  }
  return bytes;
}

}  // namespace thinwire
