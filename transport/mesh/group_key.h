// The secret that the ranks of one group share: a key file that all of them have, or else a random
// token from rank 0, which is as secret as the rendezvous store. Also MACs and random bytes. Only
// group_key.cc uses OpenSSL.
#ifndef THINWIRE_TRANSPORT_MESH_GROUP_KEY_H_
#define THINWIRE_TRANSPORT_MESH_GROUP_KEY_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace thinwire {

inline constexpr size_t kMacBytes = 32;

// RFC 2104 with SHA-256: kMacBytes bytes. Empty if OpenSSL fails, which equals no valid MAC.
std::string HmacSha256(std::string_view key, std::string_view text);

// For texts of equal length the time does not depend on where they differ.
bool SameBytes(std::string_view a, std::string_view b);

// From the kernel's generator.
std::string RandomBytes(size_t count);

// Returns the content of a key file without trailing line ends. InvalidArgument if it can't be
// read, has fewer than 16 or more than 4096 bytes, belongs to a user other than this one and root,
// or is accessible to others (its mode must be 0600 or 0400).
absl::StatusOr<std::string> ReadKeyFile(const std::string& path);

// 64 hexadecimal digits, for the store.
std::string MakeToken();

// Immutable.
class GroupKey {
 public:
  // `secret`: of the key file; empty if the group has none. With the token each group has a
  // different key, even if groups share a key file.
  GroupKey(std::string_view secret, std::string_view token);

  std::string Mac(std::string_view text) const;

  bool from_file() const { return from_file_; }
  // A public text that identifies the key without revealing it.
  std::string fingerprint() const;

 private:
  bool from_file_;
  std::string key_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_GROUP_KEY_H_
