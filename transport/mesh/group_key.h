// The secret that the ranks of one group share: a file that they all have, else a random token of
// rank 0 that is as secret as the rendezvous store; and the MACs and random bytes that need it.
// Only group_key.cc knows OpenSSL.
#ifndef THINWIRE_TRANSPORT_MESH_GROUP_KEY_H_
#define THINWIRE_TRANSPORT_MESH_GROUP_KEY_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace thinwire {

inline constexpr size_t kMacBytes = 32;

// RFC 2104 with SHA-256: kMacBytes bytes. Empty if OpenSSL fails, which equals no MAC of a message.
std::string HmacSha256(std::string_view key, std::string_view text);

// Takes the same time wherever two texts of one length differ.
bool SameBytes(std::string_view a, std::string_view b);

// From the kernel's generator.
std::string RandomBytes(size_t count);

// The content of a key file, without line ends behind it. InvalidArgument if it can't be read, has
// fewer than 16 or more than 4096 bytes, belongs to another user than this one or root, or can be
// reached by others (its mode must be 0600 or 0400).
absl::StatusOr<std::string> ReadKeyFile(const std::string& path);

// 64 hexadecimal digits, for the store.
std::string MakeToken();

// Immutable.
class GroupKey {
 public:
  // `secret`: of the key file; empty if the group has none. The token makes the key another one in
  // each group, also where groups share a file.
  GroupKey(std::string_view secret, std::string_view token);

  std::string Mac(std::string_view text) const;

  bool from_file() const { return from_file_; }
  // A text that others may know: it tells keys apart, and does not give them away.
  std::string fingerprint() const;

 private:
  bool from_file_;
  std::string key_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_GROUP_KEY_H_
