// Challenge: the two ends of a new connection prove to each other that they hold the group's key,
// which ranks they are, and that their settings are the same. It handles messages only, no sockets.
//
//   client                                             server
//   hello  = "tw1hello" client server digest nonce mac   ->
//          <-   reply  = "tw1reply" server client digest nonce mac
//   proof  = "tw1proof" mac                              ->
//          <-   admission = "tw1admit" mac
//
// Each mac covers all earlier messages and its own up to the mac. Both nonces are fresh, so a
// recording of another connection proves nothing; because of the first word and the ranks, a
// message can't be reflected or reused for another pair of ranks. The client speaks first and
// proves in its first message that it belongs to this group, so a server recognises strangers at
// once. The client sends nothing after the proof before the admission has arrived, so neither end
// reads beyond the challenge.
#ifndef THINWIRE_TRANSPORT_MESH_CHALLENGE_H_
#define THINWIRE_TRANSPORT_MESH_CHALLENGE_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "transport/mesh/group_key.h"

namespace thinwire {

// One rank's side of all its challenges.
struct Identity {
  int rank = 0;
  int size = 1;
  GroupKey key;
  std::string digest;  // kMacBytes bytes, equal on all ranks whose settings are the same
};

// The higher rank is the client, the lower one the server. Movable; `self` must outlive it.
class Challenge {
 public:
  static Challenge AsClient(const Identity& self, int server);
  static Challenge AsServer(const Identity& self);

  // The client's first message; a server has none.
  const std::string& hello() const { return transcript_; }

  // The size of the next message from the peer, in bytes. Zero: the challenge has succeeded.
  size_t awaited() const;

  // Processes a message; send `answer` unless it is empty. After an error close the connection:
  // PermissionDenied for a stranger; FailedPrecondition for a rank of the group whose settings
  // differ, which must get `answer` first.
  absl::Status Take(std::string_view message, std::string* answer);

  int peer() const { return peer_; }  // on a server, negative until a valid hello has arrived

 private:
  enum class Awaits { kHello, kReply, kProof, kAdmission, kNothing };

  Challenge(const Identity& self, int peer, Awaits awaits)
      : self_(&self), peer_(peer), awaits_(awaits) {}

  absl::Status TakeHello(std::string_view message, std::string* answer);
  absl::Status TakeReply(std::string_view message, std::string* answer);
  absl::Status TakeProof(std::string_view message, std::string* answer);
  absl::Status TakeAdmission(std::string_view message);
  std::string Greeting(std::string_view word) const;
  std::string Signed(std::string text) const;
  bool IsSigned(std::string_view message) const;
  absl::Status CompareDigest(std::string_view greeting) const;

  const Identity* self_;
  int peer_;
  Awaits awaits_;
  std::string transcript_;  // hello and reply
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_CHALLENGE_H_
