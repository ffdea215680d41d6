// How the ranks of a communicator agree before they compress: over a TCP socket of the process that
// made its unique id. They can't do so over the program's communicator: a rank that has no shim
// would take part in something else, and NCCL would hang. The socket's address and a secret travel
// in the bytes of the id that NCCL does not read. A rank that does not come is late, and nothing
// worse.
//
// A guest sends one message, and gets what all guests of its round have said:
//
//   guest: secret[16] round rank size wait_ms bytes text    (u32, little-endian)
//   host:  for each rank: bytes text                        (bytes = 2^32 - 1: it did not come)
#ifndef THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_MEETING_H_
#define THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_MEETING_H_

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "transport/membership.h"
#include "transport/mesh/descriptor.h"
#include "transport/mesh/tcp.h"
#include "transport/nccl/nccl_library.h"
#include "transport/store.h"

namespace thinwire {

// The place where the ranks of one unique id meet.
struct MeetingPlace {
  Address address;
  std::string secret;  // 16 bytes that only holders of the id know
};

// The one that was written into the id, on whatever rank; nothing if there is none.
std::optional<MeetingPlace> MeetingOf(const NcclUniqueId& id);

// Tells all ranks of a communicator `mine`, of up to kMostSaid bytes (a longer one is cut), and
// hears theirs, by rank, the same on all. A round is held once. It ends when one rank has waited
// for its `wait`: then DeadlineExceeded names the first rank that has not come, in the same words
// on all ranks. Unavailable: the host can't be reached, or is gone.
absl::StatusOr<std::vector<std::string>> TellAllAt(const MeetingPlace& meeting,
                                                   const Membership& members, uint32_t round,
                                                   std::string mine,
                                                   std::chrono::milliseconds wait);
inline constexpr size_t kMostSaid = 1024;

// The meetings of the unique ids that a process makes: one socket and one thread for all, from the
// first id on. Thread-safe.
class MeetingHost {
 public:
  MeetingHost() = default;
  ~MeetingHost();  // guests that wait are sent away
  MeetingHost(const MeetingHost&) = delete;
  MeetingHost& operator=(const MeetingHost&) = delete;

  // Writes a meeting into an id that NCCL has made just before, of bytes that were zeros. It is at
  // the address that NCCL itself listens at, with a port of its own. Unimplemented, and the id as
  // it was: this NCCL leaves no room in it, or nothing can listen there.
  absl::Status Invite(NcclUniqueId* id) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // A round is what the guests of one secret say under one number.
  struct Round {
    std::vector<std::optional<std::string>> said;  // by rank
    int told = 0;
    Deadline deadline;
    bool over = false;
  };
  struct Guest {
    Descriptor connection;
    Deadline deadline;       // of its message, and then of its answer
    std::string in, out;     // what it has sent, and is to be sent
    Round* round = nullptr;  // which it waits for the end of
  };

  absl::Status Listen(const Address& address) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Run();
  void Admit(Listener& listener);
  // Each is false if the guest is to leave.
  bool Serve(Guest& guest);
  bool Hear(Guest& guest);
  void EndRound(Round& round);
  bool IsInvited(const std::string& secret) ABSL_LOCKS_EXCLUDED(mu_);

  absl::Mutex mu_;
  Address address_ ABSL_GUARDED_BY(mu_);
  std::set<std::string> secrets_ ABSL_GUARDED_BY(mu_);  // that were given out
  Descriptor stop_;  // the end of a pipe; the thread ends when it is closed
  std::thread thread_;

  // The thread alone uses these, once it runs.
  std::optional<Listener> listener_;
  Deadline accepts_from_;  // later than now where the process had no descriptor left
  Descriptor stopped_;     // the other end
  std::list<Guest> guests_;
  std::map<std::pair<std::string, uint32_t>, Round> rounds_;  // by secret and number
};

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_MEETING_H_
