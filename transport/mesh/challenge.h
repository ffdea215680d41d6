// Challenge: the two ends of a new connection prove to each other that they hold the group's key,
// which ranks they are, and that they are set up alike. Messages only; it knows no sockets.
//
//   client                                             server
//   hello  = "tw1hello" client server digest nonce mac   ->
//          <-   reply  = "tw1reply" server client digest nonce mac
//   proof  = "tw1proof" mac                              ->
//          <-   admission = "tw1admit" mac
//
// Each mac covers all messages before it and its own up to the mac. Both nonces are fresh, so what
// was recorded of another connection proves nothing; the first word and the ranks keep a message
// from being turned round or used for another pair of ranks. The client speaks first and proves in
// its first message that it belongs to this group, so a server can tell strangers at once. Nothing
// follows the proof before the admission has come, so that neither end reads beyond the challenge.
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
  std::string digest;  // kMacBytes bytes that are equal on all ranks that are set up alike
};

// The higher rank is the client, the lower one the server. Movable; `self` must outlive it.
class Challenge {
 public:
  static Challenge AsClient(const Identity& self, int server);
  static Challenge AsServer(const Identity& self);

  // The client's first message; a server has none.
  const std::string& hello() const { return transcript_; }

  // Bytes of the peer's message that comes next. Zero: the challenge is over and was won.
  size_t awaited() const;

  // Takes a message; `answer` is to be sent, and may be empty. After an error the connection is to
  // be closed: PermissionDenied for a stranger, FailedPrecondition, with an answer to send first,
  // for a rank of the group that is set up in another way.
  absl::Status Take(std::string_view message, std::string* answer);

  int peer() const { return peer_; }  // of a server negative until the hello was right

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
