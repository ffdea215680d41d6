// Store: a key-value store through which ranks find each other. It can be torch's rendezvous store,
// a folder, or a map in this process.
#ifndef THINWIRE_TRANSPORT_STORE_H_
#define THINWIRE_TRANSPORT_STORE_H_

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/membership.h"
#include "transport/planes.h"

namespace thinwire {

// Thread-safe. Keys are written once.
class Store {
 public:
  virtual ~Store() = default;
  virtual absl::Status Set(std::string_view key, std::string_view value) = 0;
  // Waits until the key is set; DeadlineExceeded names the key.
  virtual absl::StatusOr<std::string> Get(std::string_view key, Deadline deadline) = 0;
};

// For a rank that fails before it has written what its peers wait for: writes the reason in its
// place, so that they need not wait for their deadline. Returns the reason.
absl::Status SetFailure(Store& store, std::string_view key, absl::Status why);

// Get for the key of another rank. Unavailable if that rank has set its failure there.
absl::StatusOr<std::string> GetOfPeer(Store& store, std::string_view key, int peer,
                                      const Membership& self, Deadline deadline);

// For ranks that are threads of one process.
std::shared_ptr<Store> MakeInProcessStore();

// For ranks that share a folder; a key is a file in it, which is written whole and then renamed.
std::shared_ptr<Store> MakeFileStore(std::string folder);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_STORE_H_
