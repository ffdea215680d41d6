#include "integrations/nccl_shim/nccl_meeting.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <string_view>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

// NCCL's own bytes of an id come first: 8 of a random number, 28 of the address that it listens at,
// from 2.29 on 4 of a count. It leaves the others as they are, or makes them zero.
constexpr size_t kAddressAt = 8, kOwnBytes = 48;
constexpr std::string_view kMark = "thinwire";
constexpr size_t kMarkAt = kOwnBytes, kPlaceAt = kMarkAt + kMark.size();
constexpr size_t kSecretAt = kPlaceAt + sizeof(sockaddr_in6), kSecretBytes = 16;
static_assert(kSecretAt + kSecretBytes <= sizeof(NcclUniqueId));

socklen_t LengthOf(sa_family_t family) {
  if (family == AF_INET) return sizeof(sockaddr_in);
  return family == AF_INET6 ? sizeof(sockaddr_in6) : 0;
}

// The address in those bytes of an id; of no length if there is none.
Address AddressIn(const NcclUniqueId& id, size_t at) {
  Address address;
  sa_family_t family = 0;
  std::memcpy(&family, id.bytes + at, sizeof(family));
  address.length = LengthOf(family);
  std::memcpy(&address.storage, id.bytes + at, address.length);
  return address;
}

// The same host, and any free port.
Address AnyPortOf(Address address) {
  if (address.storage.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_port = 0;
  } else {
    reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port = 0;
  }
  return address;
}

// True if the rest of an id is free, whose bytes were zeros before NCCL made it.
bool HasRoom(const NcclUniqueId& id) {
  return std::all_of(id.bytes + kOwnBytes, std::end(id.bytes), [](char byte) { return byte == 0; });
}

// A guest's message begins with the secret and this.
struct Header {
  uint32_t round, rank, size, wait_ms, bytes;
};
constexpr size_t kHeadBytes = kSecretBytes + sizeof(Header);
constexpr uint32_t kMostRanks = 1 << 16, kNobody = ~uint32_t{0};
constexpr size_t kMostGuests = 2 * kMostRanks;
constexpr std::chrono::seconds kPatience(5);  // with a guest that sends, or takes, no whole message

void AppendNumber(std::string* text, uint32_t number) {
  text->append(reinterpret_cast<const char*>(&number), sizeof(number));
}

}  // namespace

std::optional<MeetingPlace> MeetingOf(const NcclUniqueId& id) {
  if (std::string_view(id.bytes + kMarkAt, kMark.size()) != kMark) return std::nullopt;
  return MeetingPlace{AddressIn(id, kPlaceAt), std::string(id.bytes + kSecretAt, kSecretBytes)};
}

// ---- A guest

namespace {

absl::Status Await(int fd, short events, Deadline deadline) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - Clock::now() + std::chrono::milliseconds(1));
    pollfd polled{fd, events, 0};
    const int ready = poll(&polled, 1, static_cast<int>(std::max<int64_t>(0, left.count())));
    if (ready > 0) return absl::OkStatus();
    if (ready == 0) return absl::DeadlineExceededError("it does not answer");
    if (errno != EINTR) return absl::UnavailableError(std::strerror(errno));
  }
}

absl::StatusOr<Descriptor> Connect(const Address& address, Deadline deadline) {
  Descriptor made(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!made.valid()) return absl::UnavailableError(std::strerror(errno));
  if (connect(made.fd(), address.get(), address.length) == 0) return made;
  if (errno != EINPROGRESS) return absl::UnavailableError(std::strerror(errno));
  if (absl::Status late = Await(made.fd(), POLLOUT, deadline); !late.ok()) return late;
  int error = 0;
  socklen_t length = sizeof(error);
  getsockopt(made.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) return absl::UnavailableError(std::strerror(error));
  return made;
}

// Sends the message, and returns all that comes until the host hangs up.
absl::StatusOr<std::string> Ask(const MeetingPlace& meeting, std::string_view message,
                                Deadline deadline) {
  const absl::StatusOr<Descriptor> host = Connect(meeting.address, deadline);
  if (!host.ok()) return host.status();
  while (!message.empty()) {
    const ssize_t sent = send(host->fd(), message.data(), message.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      message.remove_prefix(sent);
    } else if (errno != EAGAIN && errno != EINTR) {
      return absl::UnavailableError(std::strerror(errno));
    } else if (absl::Status late = Await(host->fd(), POLLOUT, deadline); !late.ok()) {
      return late;
    }
  }
  std::string answer;
  for (char bytes[4096];;) {
    const ssize_t got = recv(host->fd(), bytes, sizeof(bytes), 0);
    if (got == 0) return answer;
    if (got > 0) {
      answer.append(bytes, got);
    } else if (errno != EAGAIN && errno != EINTR) {
      return absl::UnavailableError(std::strerror(errno));
    } else if (absl::Status late = Await(host->fd(), POLLIN, deadline); !late.ok()) {
      return late;
    }
  }
}

// The answer holds what all said, by rank, and nothing of those who did not come. Empty: it is not
// whole.
std::vector<std::optional<std::string>> ParseAnswer(std::string_view answer, int size) {
  std::vector<std::optional<std::string>> said;
  while (said.size() < static_cast<size_t>(size)) {
    uint32_t bytes = 0;
    if (answer.size() < sizeof(bytes)) return {};
    std::memcpy(&bytes, answer.data(), sizeof(bytes));
    answer.remove_prefix(sizeof(bytes));
    if (bytes == kNobody) {
      said.emplace_back();
      continue;
    }
    if (answer.size() < bytes) return {};
    said.emplace_back(answer.substr(0, bytes));
    answer.remove_prefix(bytes);
  }
  return said;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> TellAllAt(const MeetingPlace& meeting,
                                                   const Membership& members, uint32_t round,
                                                   std::string mine,
                                                   std::chrono::milliseconds wait) {
  mine.resize(std::min(mine.size(), kMostSaid));
  const Header header{round, static_cast<uint32_t>(members.rank),
                      static_cast<uint32_t>(members.size), static_cast<uint32_t>(wait.count()),
                      static_cast<uint32_t>(mine.size())};
  const std::string head(reinterpret_cast<const char*>(&header), sizeof(header));
  // The host ends a round at the first deadline of those who have come, so either all of them have
  // its word, or it is gone.
  const absl::StatusOr<std::string> answer =
      Ask(meeting, absl::StrCat(meeting.secret, head, mine), Clock::now() + wait + kPatience);
  const auto said =
      answer.ok() ? ParseAnswer(*answer, members.size) : std::vector<std::optional<std::string>>();
  if (said.empty()) {
    return absl::UnavailableError(
        absl::StrCat("the process that made the communicator's unique id, at ",
                     meeting.address.Host(), " port ", meeting.address.Port(), ", can't be asked (",
                     answer.ok() ? "it hung up" : std::string(answer.status().message()),
                     "); see that no firewall is between the ranks"));
  }
  std::vector<std::string> all;
  for (size_t rank = 0; rank < said.size(); ++rank) {
    if (!said[rank].has_value()) {
      return absl::DeadlineExceededError(
          absl::StrCat("not all ranks came in time, rank ", rank,
                       " for one; set THINWIRE_NCCL_CODEC and LD_PRELOAD on all of them"));
    }
    all.push_back(*said[rank]);
  }
  return all;
}

// ---- The host

MeetingHost::~MeetingHost() {
  stop_ = Descriptor();
  if (thread_.joinable()) thread_.join();
}

absl::Status MeetingHost::Invite(NcclUniqueId* id) {
  const Address theirs = AddressIn(*id, kAddressAt);
  if (!HasRoom(*id) || theirs.length == 0) {
    return absl::UnimplementedError(
        "this version of NCCL has other unique ids than those that are known, so that the ranks "
        "can't find each other; use NCCL 2.18 to 2.31");
  }
  std::string secret(kSecretBytes, '\0');
  if (getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size())) {
    return absl::UnimplementedError("the system has no random numbers");
  }
  const absl::MutexLock lock(&mu_);
  if (address_.length == 0) {
    if (absl::Status bad = Listen(AnyPortOf(theirs)); !bad.ok()) return bad;
  }
  secrets_.insert(secret);
  std::memcpy(id->bytes + kMarkAt, kMark.data(), kMark.size());
  std::memset(id->bytes + kPlaceAt, 0, sizeof(sockaddr_in6));
  std::memcpy(id->bytes + kPlaceAt, &address_.storage, address_.length);
  std::memcpy(id->bytes + kSecretAt, secret.data(), kSecretBytes);
  return absl::OkStatus();
}

absl::Status MeetingHost::Listen(const Address& address) {
  absl::StatusOr<Listener> listener = Listener::Open(address);
  int ends[2] = {-1, -1};
  if (listener.ok() && pipe2(ends, O_CLOEXEC) != 0) {
    listener = absl::UnavailableError(std::strerror(errno));
  }
  if (!listener.ok()) {
    return absl::UnimplementedError(
        absl::StrCat("the ranks can't find each other: ", listener.status().message(), " (",
                     address.Host(), ")"));
  }
  listener_ = *std::move(listener);
  address_ = listener_->address();
  stopped_ = Descriptor(ends[0]);
  stop_ = Descriptor(ends[1]);
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

bool MeetingHost::IsInvited(const std::string& secret) {
  const absl::MutexLock lock(&mu_);
  return secrets_.contains(secret);
}

void MeetingHost::Run() {
  for (;;) {
    Deadline next = Clock::now() + std::chrono::hours(1);
    const bool accepts = Clock::now() >= accepts_from_;
    if (!accepts) next = accepts_from_;
    std::vector<pollfd> polled = {{stopped_.fd(), POLLIN, 0},
                                  {listener_->fd(), static_cast<short>(accepts ? POLLIN : 0), 0}};
    for (const Guest& guest : guests_) {
      // A guest that only waits says nothing more, so what is heard of it is that it is gone.
      polled.push_back(
          {guest.connection.fd(), static_cast<short>(guest.out.empty() ? POLLIN : POLLOUT), 0});
      if (guest.round == nullptr) next = std::min(next, guest.deadline);
    }
    for (const auto& [key, round] : rounds_) {
      if (!round.over) next = std::min(next, round.deadline);
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(next - Clock::now());
    poll(polled.data(), polled.size(), static_cast<int>(std::max<int64_t>(0, left.count() + 1)));
    if (polled[0].revents != 0) return;

    auto guest = guests_.begin();
    for (size_t i = 2; i < polled.size(); ++i) {
      const bool stays = polled[i].revents == 0 || Serve(*guest);
      guest = stays ? std::next(guest) : guests_.erase(guest);
    }
    if (polled[1].revents != 0) Admit(*listener_);
    const Deadline now = Clock::now();
    for (auto& [key, round] : rounds_) {
      if (!round.over && round.deadline <= now) EndRound(round);
    }
    guests_.remove_if([now](const Guest& g) { return g.round == nullptr && g.deadline <= now; });
  }
}

void MeetingHost::Admit(Listener& listener) {
  for (;;) {
    absl::StatusOr<Descriptor> connection = listener.Accept();
    if (!connection.ok()) accepts_from_ = Clock::now() + std::chrono::seconds(1);
    if (!connection.ok() || !connection->valid()) return;
    if (guests_.size() >= kMostGuests) continue;  // it is closed
    Guest guest;
    guest.connection = *std::move(connection);
    guest.deadline = Clock::now() + kPatience;
    guests_.push_back(std::move(guest));
  }
}

bool MeetingHost::Serve(Guest& guest) {
  if (guest.out.empty()) return Hear(guest);
  const ssize_t sent =
      send(guest.connection.fd(), guest.out.data(), guest.out.size(), MSG_NOSIGNAL);
  if (sent < 0) return errno == EAGAIN || errno == EINTR;
  guest.out.erase(0, sent);
  return !guest.out.empty();
}

bool MeetingHost::Hear(Guest& guest) {
  char bytes[kHeadBytes + kMostSaid];
  const ssize_t got = recv(guest.connection.fd(), bytes, sizeof(bytes), 0);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got == 0 || guest.round != nullptr) return false;
  guest.in.append(bytes, got);
  if (guest.in.size() < kHeadBytes) return true;

  const std::string secret = guest.in.substr(0, kSecretBytes);
  Header header;
  std::memcpy(&header, guest.in.data() + kSecretBytes, sizeof(header));
  if (!IsInvited(secret) || header.size > kMostRanks || header.rank >= header.size ||
      header.bytes > kMostSaid || guest.in.size() > kHeadBytes + header.bytes) {
    return false;
  }
  if (guest.in.size() < kHeadBytes + header.bytes) return true;
  Round& round = rounds_[{secret, header.round}];
  if (round.said.empty()) {
    round.said.resize(header.size);
    round.deadline = Deadline::max();
  }
  if (round.said.size() != header.size) return false;
  // Nobody who has spoken leaves before the round ends.
  round.deadline =
      std::min(round.deadline, Clock::now() + std::chrono::milliseconds(header.wait_ms));
  guest.round = &round;
  if (!round.over && !round.said[header.rank].has_value()) {
    round.said[header.rank] = guest.in.substr(kHeadBytes);
    ++round.told;
  }
  if (round.over || round.told == static_cast<int>(header.size)) EndRound(round);
  return true;
}

// All who wait for it, or come later, are sent the same.
void MeetingHost::EndRound(Round& round) {
  round.over = true;
  std::string answer;
  for (const std::optional<std::string>& said : round.said) {
    AppendNumber(&answer, said.has_value() ? static_cast<uint32_t>(said->size()) : kNobody);
    if (said.has_value()) answer += *said;
  }
  for (Guest& guest : guests_) {
    if (guest.round != &round) continue;
    guest.round = nullptr;
    guest.out = answer;
    guest.deadline = Clock::now() + kPatience;
  }
}

}  // namespace thinwire
