// HMAC-SHA256 and random bytes. Of OpenSSL only hmac.cc knows.
#ifndef THINWIRE_TRANSPORT_MESH_HMAC_H_
#define THINWIRE_TRANSPORT_MESH_HMAC_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace thinwire {

inline constexpr size_t kMacBytes = 32;

// RFC 2104 with SHA-256: kMacBytes bytes. Empty if OpenSSL fails, which equals no MAC of a message.
std::string HmacSha256(std::string_view key, std::string_view text);

// Takes the same time wherever two texts of one length differ.
bool SameBytes(std::string_view a, std::string_view b);

// From the kernel's generator.
std::string RandomBytes(size_t count);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_HMAC_H_
