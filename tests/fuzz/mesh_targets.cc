// Bytes received on a connection before the challenge is over, and bytes read from the store.
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "schedule/join/handshake.h"
#include "tests/fuzz/target.h"
#include "transport/mesh/challenge.h"
#include "transport/mesh/group_key.h"
#include "transport/mesh/mesh.h"

namespace thinwire::fuzz {
namespace {

Identity Rank(int rank, const std::string& secret = "a key of this group") {
  return {rank, 4, GroupKey(secret, "token"), std::string(kMacBytes, 'd')};
}

// No bytes of a stranger pass the challenge.
void AgainstStranger(Challenge challenge, Input& input) {
  std::string answer;
  while (challenge.awaited() > 0 && !input.empty()) {
    std::string message(challenge.awaited(), '\0');
    const std::span<const uint8_t> given = input.TakeBytes(message.size());
    std::copy(given.begin(), given.end(), message.begin());
    if (!challenge.Take(message, &answer).ok()) return;
  }
  Require(challenge.awaited() > 0, "nobody without the key is let in");
}

void Server(Input& input) {
  const Identity self = Rank(0);
  AgainstStranger(Challenge::AsServer(self), input);
}

void Client(Input& input) {
  const Identity self = Rank(3);
  AgainstStranger(Challenge::AsClient(self, 0), input);
}

// Two ranks of the group, and an attacker between them who changes one byte.
void Tampered(Input& input) {
  const Identity low = Rank(0), high = Rank(1 + static_cast<int>(input.Below(3)));
  Challenge server = Challenge::AsServer(low), client = Challenge::AsClient(high, 0);
  const uint32_t which = input.Below(4), place = input.Below(1024);
  const uint8_t change = input.Take<uint8_t>();
  bool changed = false;
  std::string message = client.hello();
  for (uint32_t number = 0; !message.empty(); ++number) {
    if (number == which) {
      message[place % message.size()] ^= static_cast<char>(change);
      changed = change != 0;
    }
    std::string answer;
    Challenge& taker = number % 2 == 0 ? server : client;
    if (!taker.Take(message, &answer).ok()) {
      return Require(changed, "an untouched challenge is won");
    }
    message = answer;
  }
  Require(!changed, "a changed message is refused");
  Require(server.awaited() == 0 && client.awaited() == 0, "an untouched challenge is won");
  Require(server.peer() == high.rank, "the server knows who came");
}

// A store in which another rank, or an attacker, has written arbitrary values.
class WrittenStore final : public Store {
 public:
  explicit WrittenStore(std::string theirs) : theirs_(std::move(theirs)) {}
  absl::Status Set(std::string_view key, std::string_view value) override {
    own_.emplace(key, value);
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> Get(std::string_view key, Deadline) override {
    const auto found = own_.find(std::string(key));
    return found == own_.end() ? theirs_ : found->second;
  }

 private:
  const std::string theirs_;
  std::map<std::string, std::string> own_;
};

void Hello(Input& input) {
  MeshOptions options;
  options.size = 2;
  options.store = std::make_shared<WrittenStore>(input.RestAsText());
  options.deadline = Clock::now();
  const absl::StatusOr<Meeting> meeting =
      Meet(options, "a key of this group", *Address::Of("127.0.0.1", 1));
  if (meeting.ok()) return Require(meeting->addresses[1].Port() >= 0, "an address has a port");
  Require(meeting.status().message().find("rank 1") != std::string::npos, "the rank is named");
}

void Digests(Input& input) {
  WrittenStore store(input.RestAsText());
  const absl::Status status = Handshake(store, "", 0, 2, Options{}, Clock::now()).status();
  Require(status.ok() || status.message().find("rank 1") != std::string::npos, "the rank is named");
}

}  // namespace

const std::vector<Target> kMeshTargets = {
    {"server", Server}, {"client", Client},     {"tampered", Tampered},
    {"hello", Hello},   {"handshake", Digests},
};

}  // namespace thinwire::fuzz
