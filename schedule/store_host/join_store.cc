#include "schedule/store_host/join_store.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "schedule/store/ledger.h"
#include "schedule/store_host/serve.h"
#include "transport/mesh/group_key.h"
#include "transport/messages/in_process.h"
#include "transport/messages/zmq/zmq_messages.h"

namespace thinwire {
namespace {

// Returns the hub of that name, creating it if no member holds it.
std::shared_ptr<MessageHub> HubOf(const std::string& name) {
  static absl::Mutex* const mu = new absl::Mutex;
  static auto* const hubs = new std::map<std::string, std::weak_ptr<MessageHub>>;
  const absl::MutexLock lock(mu);
  std::shared_ptr<MessageHub> hub = (*hubs)[name].lock();
  if (hub == nullptr) (*hubs)[name] = hub = MakeMessageHub({});
  return hub;
}

// How long a member waits for a key that it may have set itself before a restart.
constexpr std::chrono::milliseconds kLook{50};

std::string Members(const StorePlace& place) {
  return absl::StrCat(" ", place.workers, " workers and ", place.servers, " servers");
}

// Makes the key from the key file's secret, if any, and the token that worker 0 puts in the store.
// The token ends with worker 0's numbers of members; FailedPrecondition if this member's differ.
absl::StatusOr<GroupKey> AgreeOnKey(const StorePlace& place, Deadline deadline) {
  std::string secret;
  if (!place.key_file.empty()) {
    absl::StatusOr<std::string> read = ReadKeyFile(place.key_file);
    if (!read.ok()) return read.status();
    secret = *std::move(read);
  }
  const std::string at = absl::StrCat(place.group, "/kv/token");
  if (place.rank == 0 && !place.store->Get(at, Clock::now() + kLook).ok()) {
    const std::string own = absl::StrCat(MakeToken(), Members(place));
    if (absl::Status bad = place.store->Set(at, own); !bad.ok()) return bad;
  }
  const absl::StatusOr<std::string> token = place.store->Get(at, deadline);
  if (!token.ok()) {
    return absl::Status(token.status().code(),
                        absl::StrCat("rank ", place.rank, ": worker 0 did not come to the store: ",
                                     token.status().message()));
  }
  if (!absl::EndsWith(*token, Members(place))) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", place.rank, " is in a store with", Members(place), ", worker 0 in one with",
        token->substr(std::min(token->size(), token->find(' '))),
        "; start all members with the same numbers (THINWIRE_SERVERS, WORLD_SIZE)"));
  }
  return GroupKey(secret, *token);
}

// The port of "host:port", or 0.
int PortOf(std::string_view address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon == std::string_view::npos) return 0;
  return absl::SimpleAtoi(std::string(address.substr(colon + 1)), &port) ? port : 0;
}

}  // namespace

absl::StatusOr<StoreMembership> JoinStore(const StorePlace& place) {
  if (place.workers < 1 || place.workers > kMaxStoreWorkers || place.servers < 1 ||
      place.servers > kMaxStoreWorkers || place.rank < 0 ||
      place.rank - place.servers >= kMaxStoreWorkers) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", place.rank, " of a store with ", place.workers, " workers and ",
                     place.servers, " servers: expected 1 to ", kMaxStoreWorkers,
                     " of each, and a rank from 0 on, of at most ", kMaxStoreWorkers, " workers"));
  }
  std::vector<int> servers;
  for (int server = 0; server < place.servers; ++server) {
    servers.push_back(RankOfServer(place.workers, server));
  }
  if (!place.local_group.empty()) {
    return StoreMembership{JoinMessageHub(HubOf(place.local_group), place.rank,
                                          place.is_server() ? std::vector<int>() : servers),
                           "local", 0, place.journal_failure};
  }
  if (place.store == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", place.rank, " got no place to meet the store's other members at; set ",
        "options.store, options.store_path or options.local_group"));
  }
  const auto address_of = [&](int rank) { return absl::StrCat(place.group, "/kv/address/", rank); };
  // Sets the reason in place of the address, for workers to read.
  const auto refuse = [&](const absl::Status& why) {
    const std::string text = absl::StrCat("-", why.raw_code(), " ", why.message());
    place.store->Set(address_of(place.rank), text).IgnoreError();
    return why;
  };
  int former_port = 0;  // where a former process of this server listened in this run
  if (place.is_server() && place.has_journal) {
    const auto former = place.store->Get(address_of(place.rank), Clock::now() + kLook);
    if (former.ok()) former_port = PortOf(former->substr(0, former->find(' ')));
  }
  if (!place.journal_failure.ok() && former_port == 0) return refuse(place.journal_failure);
  const Deadline deadline = Clock::now() + place.timeout;
  const absl::StatusOr<GroupKey> key = AgreeOnKey(place, deadline);
  if (!key.ok()) {
    return place.is_server() && former_port == 0 ? refuse(key.status()) : key.status();
  }
  ZmqOptions options;
  options.rank = place.rank;
  options.key = *key;
  options.listens = place.is_server();
  if (place.former_run == key->fingerprint()) options.port = place.former_port;
  options.interface = place.interface;
  options.rendezvous_host = place.rendezvous_host;
  options.library = place.zmq_library;
  if (place.is_server()) {
    absl::Status failure = place.journal_failure;
    if (former_port != 0 && place.former_run != key->fingerprint()) {
      options.port = former_port;
      if (failure.ok()) {
        failure = absl::DataLossError(
            "it has served this run before, and its journal is not here, so its values are gone; "
            "start a server again on its host, or give it a journal on a disk that all hosts "
            "share");
      }
    }
    absl::StatusOr<std::unique_ptr<ZmqMessagePlane>> plane = StartZmqMessages(options);
    // Another process listens at the former port, so its address stays in the store.
    if (!plane.ok() && !failure.ok()) return failure;
    if (!plane.ok()) return refuse(plane.status());
    const std::string& address = (*plane)->address();
    const absl::Status set =
        place.store->Set(address_of(place.rank), absl::StrCat(address, " ", key->fingerprint()));
    if (!set.ok()) return set;
    const int port = PortOf(address);
    return StoreMembership{*std::move(plane), key->fingerprint(), port, std::move(failure)};
  }
  for (const int server : servers) {
    const absl::StatusOr<std::string> text = place.store->Get(address_of(server), deadline);
    const int number = server - place.workers;
    if (!text.ok()) {
      return absl::Status(text.status().code(),
                          absl::StrCat("worker ", place.rank, ": server ", number,
                                       " did not come: ", text.status().message()));
    }
    const std::vector<std::string> words = absl::StrSplit(*text, absl::MaxSplits(' ', 1));
    if (int code = 0; absl::SimpleAtoi(words[0], &code) && code < 0) {
      return absl::Status(
          static_cast<absl::StatusCode>(-code),
          absl::StrCat("worker ", place.rank, ": server ", number, " can't serve: ", words.back()));
    }
    if (words.back() != key->fingerprint()) {
      return absl::FailedPreconditionError(
          absl::StrCat("worker ", place.rank, " has key ", key->fingerprint(), ", server ", number,
                       " has ", words.back(), "; give all members the same key file"));
    }
    options.calls[server] = words[0];
  }
  absl::StatusOr<std::unique_ptr<ZmqMessagePlane>> plane = StartZmqMessages(options);
  if (!plane.ok()) return plane.status();
  return StoreMembership{*std::move(plane), key->fingerprint(), 0};
}

}  // namespace thinwire
