// ZmqMessagePlane beyond the contract: strangers, members that break the protocol, processes that
// are killed or stopped.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/transport/message_members.h"
#include "transport/mesh/group_key.h"
#include "transport/mesh/tcp.h"
#include "transport/messages/zmq/zmq_frames.h"
#include "transport/messages/zmq/zmq_library.h"
#include "transport/messages/zmq/zmq_socket.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kServer = 0;

GroupKey TestKey() { return GroupKey("", "a token of tests"); }

// A server, and a worker that is connected to it.
class ZmqMessages : public testing::Test {
 protected:
  void Start(const MessageLimits& limits = {}) {
    members_ = std::make_unique<ZmqMembers>(limits);
    limits_ = limits;
    server_ = members_->Join(kServer, {});
    worker_ = members_->Join(1, {kServer});
    ExpectJoined(*server_, 1);
    ExpectJoined(*worker_, kServer);
  }
  // Sends a message in each direction, and expects no other event on either side.
  void ExpectUnmoved() {
    ASSERT_TRUE(worker_->Send(kServer, 0, "question", std::vector<uint8_t>(1000, 1)).ok());
    EXPECT_EQ(NextMessage(*server_).head, "question");
    ASSERT_TRUE(server_->Send(1, 0, "answer", std::vector<uint8_t>(1000, 2)).ok());
    EXPECT_EQ(NextMessage(*worker_).head, "answer");
  }
  void ExpectNewMembersAdmitted() {
    const auto another = members_->Join(2, {kServer});
    ExpectJoined(*another, kServer);
    ExpectJoined(*server_, 2);
    EXPECT_TRUE(another->Close(Soon()).ok());
    EXPECT_EQ(ExpectLost(*server_, 2).code(), absl::StatusCode::kCancelled);
  }
  int port() { return members_->PortOf(kServer); }

  MessageLimits limits_;
  std::unique_ptr<ZmqMembers> members_;
  std::unique_ptr<MessagePlane> server_, worker_;
};

Descriptor Visit(int port) {
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address{.sin_family = AF_INET,
                            .sin_port = htons(static_cast<uint16_t>(port)),
                            .sin_addr = {htonl(INADDR_LOOPBACK)},
                            .sin_zero = {}};
  if (connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Descriptor();
  }
  return socket;
}

// The beginning of ZMTP 3.1 with CURVE, as a client sends it.
std::string ZmtpGreeting() {
  std::string greeting(64, '\0');
  greeting[0] = '\xff';
  greeting[9] = '\x7f';
  greeting[10] = 3;
  greeting[11] = 1;
  greeting.replace(12, 5, "CURVE");
  return greeting;
}

class Strangers : public ZmqMessages, public testing::WithParamInterface<std::pair<int, int>> {};
INSTANTIATE_TEST_SUITE_P(Some, Strangers, testing::Values(std::make_pair(500, 3000)));
INSTANTIATE_TEST_SUITE_P(HundredThousand, Strangers, testing::Values(std::make_pair(2000, 100000)));

TEST_P(Strangers, WhoSayNothingOrGarbageChangeNothing) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  Start();
  const auto [idle, visits] = GetParam();
  std::deque<Descriptor> held;
  for (int i = 0; i < idle; ++i) held.push_back(Visit(port()));
  ExpectUnmoved();
  ExpectNewMembersAdmitted();
  int came = 0;
  for (int i = 0; i < visits; ++i) {
    const Descriptor socket = Visit(port());
    if (!socket.valid()) continue;
    ++came;
    std::string said = i % 3 == 0 ? "" : RandomBytes(random() % 300);
    if (i % 3 == 2) said = ZmtpGreeting() + said;
    if (!said.empty()) send(socket.fd(), said.data(), said.size(), MSG_NOSIGNAL);
    if (i % 500 == 0) ExpectUnmoved();
  }
  EXPECT_GT(came, visits - visits / 30);
  ExpectUnmoved();
  held.clear();
  ExpectNewMembersAdmitted();
  ExpectUnmoved();
}

// Calls the server with foreign keys, and waits until each call has failed.
void CallWith(const ZmqKeys& keys, int port, int count) {
  const auto zmq = *LoadZmq("");
  const auto context = *ZmqContext::Make(zmq, 1);
  const std::string hello = HelloFrame({.from = 5, .to = kServer});
  struct Call {
    ZmqSocket socket, monitor;
  };
  std::deque<Call> calls;
  for (int i = 0; i < count || !calls.empty(); ++i) {
    if (i < count) {
      Call call{.socket = *ZmqSocket::Open(*context, kZmqDealer), .monitor = {}};
      ASSERT_TRUE(call.socket.SecureAsClient(keys).ok());
      ASSERT_TRUE(call.socket.Set(kZmqReconnectInterval, 3600 * 1000).ok());
      call.monitor = *call.socket.Monitor(
          *context, absl::StrCat("call-", i),
          kZmqHandshakeFailed | kZmqHandshakeFailedProtocol | kZmqHandshakeFailedAuth);
      ASSERT_TRUE(call.socket.Connect(absl::StrCat("tcp://127.0.0.1:", port)).ok());
      ZmqFrame frame(*zmq, hello.size());
      std::ranges::copy(hello, frame.bytes().begin());
      call.socket.Send(frame, false);
      calls.push_back(std::move(call));
    }
    if (calls.size() < 50 && i < count) continue;
    Call& oldest = calls.front();
    ZmqPollItem item{.socket = oldest.monitor.get(), .events = kZmqPollIn};
    EXPECT_EQ(zmq->poll(&item, 1, 20000), 1) << "a stranger was not turned away";
    ZmqFrame frame(*zmq);
    EXPECT_FALSE(oldest.socket.Receive(frame)) << "a stranger has an answer";
    oldest.socket.StopMonitor();
    calls.pop_front();
  }
}

TEST_F(ZmqMessages, WrongKeysInBulkChangeNothing) {
  Start();
  const auto zmq = *LoadZmq("");
  const ZmqKeys ours = *ZmqKeys::Derive(*zmq, TestKey());
  const ZmqKeys theirs = *ZmqKeys::Derive(*zmq, GroupKey("", "another token"));
  ZmqKeys mixed = theirs;  // with the server's public key, which no stranger has
  mixed.server_public = ours.server_public;
  std::thread wrong([&] { CallWith(theirs, port(), 400); });
  std::thread half([&] { CallWith(mixed, port(), 400); });
  for (int i = 0; i < 20; ++i) ExpectUnmoved();
  ExpectNewMembersAdmitted();
  wrong.join();
  half.join();
  ExpectUnmoved();
  ExpectNewMembersAdmitted();
}

TEST_F(ZmqMessages, AMemberWithAnotherKeyHearsWhyNobodyAnswers) {
  Start();
  ZmqOptions options = members_->Options(2, {kServer});
  options.key = GroupKey("", "another token");
  const auto plane = *StartZmqMessages(options);
  ExpectNothingCame(*plane, {"rank 0 is not connected", "127.0.0.1:", "another key"});
  ExpectUnmoved();
}

TEST_F(ZmqMessages, AMemberWithOtherSettingsIsRefusedWithTheDifference) {
  Start();
  ZmqOptions options = members_->Options(2, {kServer});
  options.limits.credit = 12345;
  auto plane = *StartZmqMessages(options);
  absl::Status refused = ExpectLost(*plane, kServer);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(refused.message().find("12345"), absl::string_view::npos) << refused;
  options = members_->Options(2, {});
  options.listens = false;
  options.calls[3] = absl::StrCat("127.0.0.1:", port());  // rank 0's address
  plane = *StartZmqMessages(options);
  refused = ExpectLost(*plane, 3);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(refused.message().find("takes this member for rank 3"), absl::string_view::npos)
      << refused;
  options.rank = kServer;
  options.calls = {{kServer, absl::StrCat("127.0.0.1:", port())}};
  plane = *StartZmqMessages(options);
  EXPECT_EQ(ExpectLost(*plane, kServer).code(), absl::StatusCode::kFailedPrecondition);
  ExpectUnmoved();
}

TEST_F(ZmqMessages, AnAddressThatCannotBeIsAnError) {
  Start();
  for (const char* address : {"", "localhost:70", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:70000",
                              "::1:70", "127.0.0.1:x"}) {
    ZmqOptions options = members_->Options(2, {kServer});
    options.calls[7] = address;
    EXPECT_EQ(StartZmqMessages(options).status().code(), absl::StatusCode::kInvalidArgument)
        << address;
  }
  ZmqOptions options = members_->Options(kServer, {});
  const auto taken = StartZmqMessages(options);
  EXPECT_EQ(taken.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(taken.status().message().find("in use"), absl::string_view::npos) << taken.status();
  options.interface = "no_such_interface";
  EXPECT_EQ(StartZmqMessages(options).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ZmqMessages, TheLibraryIsLookedForAndItsAbsenceExplained) {
  EXPECT_EQ((*LoadZmq(""))->version.substr(0, 2), "4.");
  ZmqOptions options;
  for (const char* file : {"/no/such/libzmq.so", "libc.so.6"}) {
    options.library = file;
    const absl::Status none = StartZmqMessages(options).status();
    EXPECT_EQ(none.code(), absl::StatusCode::kUnimplemented);
    EXPECT_NE(none.message().find("libzmq5"), absl::string_view::npos) << none;
  }
}

TEST_F(ZmqMessages, ANewAddressReplacesTheFormerOne) {
  Start();
  ZmqOptions elsewhere = members_->Options(kServer, {});
  elsewhere.port = 0;
  const auto moved = *StartZmqMessages(elsewhere);
  auto* const worker = dynamic_cast<ZmqMessagePlane*>(worker_.get());
  ASSERT_TRUE(worker->Call(kServer, moved->address()).ok());
  EXPECT_EQ(ExpectLost(*worker_, kServer).code(), absl::StatusCode::kUnavailable);
  ExpectJoined(*worker_, kServer);
  ExpectJoined(*moved, 1);
  EXPECT_EQ(ExpectLost(*server_, 1).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(worker->Call(kServer, "nowhere").code(), absl::StatusCode::kInvalidArgument);
}

// A member whose frames a test writes.
class RawMember {
 public:
  RawMember(int port, int rank, const MessageLimits& limits)
      : zmq_(*LoadZmq("")), context_(*ZmqContext::Make(zmq_, 1)) {
    socket_ = *ZmqSocket::Open(*context_, kZmqDealer);
    EXPECT_TRUE(socket_.SecureAsClient(*ZmqKeys::Derive(*zmq_, TestKey())).ok());
    EXPECT_TRUE(socket_.Connect(absl::StrCat("tcp://127.0.0.1:", port)).ok());
    Say(HelloFrame({.from = rank,
                    .to = kServer,
                    .credit = limits.credit,
                    .max_message = limits.max_message,
                    .timeout_ms = static_cast<uint32_t>(limits.timeout.count())}));
  }
  void Say(const std::string& text) {
    ZmqFrame frame(*zmq_, text.size());
    std::ranges::copy(text, frame.bytes().begin());
    socket_.Send(frame, false);
  }
  // Returns the next frame other than kAlive; empty at the deadline.
  std::string Hear(Deadline deadline = Soon()) {
    while (Clock::now() < deadline) {
      ZmqPollItem item{.socket = socket_.get(), .events = kZmqPollIn};
      zmq_->poll(&item, 1, 20);
      ZmqFrame frame(*zmq_);
      if (socket_.Receive(frame) && frame.text() != PlainFrame(FrameKind::kAlive)) {
        return std::string(frame.text());
      }
    }
    return "";
  }
  static std::string PieceFrame(const MessagePiece& piece, const std::string& part) {
    std::string frame(kPieceHeader, '\0');
    WritePieceHeader(piece, reinterpret_cast<uint8_t*>(frame.data()));
    return frame + part;
  }

 private:
  const std::shared_ptr<const ZmqLibrary> zmq_;
  const std::unique_ptr<ZmqContext> context_;
  ZmqSocket socket_;
};

TEST_F(ZmqMessages, AMessageThatIsMissingOrTooLargeEndsTheConnection) {
  Start({.credit = 10000, .max_message = 50000});
  struct Case {
    const char* what;
    std::vector<std::string> frames;
  };
  const auto piece = [](uint64_t number, uint64_t body, uint64_t offset, size_t part) {
    return RawMember::PieceFrame(
        {.number = number, .head_bytes = 0, .body_bytes = body, .offset = offset},
        std::string(part, 'x'));
  };
  const std::string full = piece(0, 9000, 0, 9000);
  const Case cases[] = {
      {"message 0 was expected", {piece(1, 10, 0, 10)}},
      {"message 0 was expected from byte 5", {piece(0, 10, 0, 5), piece(0, 10, 6, 4)}},
      {"message 0 was expected", {piece(0, 10, 5, 5)}},
      {"message 0 was expected from byte 5", {piece(0, 10, 0, 5), piece(0, 12, 5, 7)}},
      {"50000 are allowed", {piece(0, 50001, 0, 10)}},
      {"10000 are allowed", {full, piece(1, 9000, 0, 10)}},
      {"can't be read", {piece(0, 10, 0, 11)}},
      {"can't be read", {piece(0, uint64_t{1} << 63, 0, 11)}},
      {"can't be read", {std::string("\x04", 1)}},
      {"more than was sent", {TakenFrame(1)}},
      {"no place here", {"\x63junk"}},
  };
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.what);
    RawMember member(port(), 2, limits_);
    EXPECT_EQ(KindOf(Bytes(reinterpret_cast<const uint8_t*>(member.Hear().data()), 1)),
              FrameKind::kWelcome);
    ExpectJoined(*server_, 2);
    for (const std::string& frame : bad.frames) member.Say(frame);
    EXPECT_EQ(member.Hear(), PlainFrame(FrameKind::kReset));  // the server takes nothing before
    const absl::Status lost = ExpectLost(*server_, 2);
    EXPECT_EQ(lost.code(), absl::StatusCode::kDataLoss);
    EXPECT_NE(lost.message().find(bad.what), absl::string_view::npos) << lost;
    ExpectUnmoved();
  }
}

TEST_F(ZmqMessages, RandomFramesOfMembersEndOnlyTheirOwnConnections) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  Start({.credit = 10000, .max_message = 50000});
  const std::vector<std::string> valid = {
      HelloFrame({.from = 2, .to = kServer}),
      HelloFrame({.from = 1, .to = kServer, .credit = 10000, .max_message = 50000}),
      WelcomeFrame({.from = 2, .to = kServer}),
      RefusedFrame("no"),
      TakenFrame(0),
      PlainFrame(FrameKind::kAlive),
      PlainFrame(FrameKind::kGoodbye),
      PlainFrame(FrameKind::kReset),
      RawMember::PieceFrame({.body_bytes = 100}, std::string(100, 'x')),
      RawMember::PieceFrame({.body_bytes = 40000}, std::string(100, 'x'))};
  std::unique_ptr<RawMember> member;
  for (int i = 0; i < 10000; ++i) {
    if (i % 25 == 0) member = std::make_unique<RawMember>(port(), 2, limits_);
    std::string frame = valid[random() % valid.size()];
    for (unsigned changes = random() % 3; changes > 0; --changes) {
      frame[random() % frame.size()] = static_cast<char>(random());
    }
    if (random() % 4 == 0) frame.resize(random() % (frame.size() + 9));
    member->Say(frame);
  }
  member.reset();
  // The worker is still connected, whatever has happened to rank 2.
  ASSERT_TRUE(worker_->Send(kServer, 100, "question", {}).ok());
  for (;;) {
    auto event = server_->Receive(Soon());
    ASSERT_TRUE(event.ok()) << event.status();
    if (auto* message = std::get_if<Message>(&*event)) {
      if (message->peer == 1 && message->head == "question") break;
    } else {
      EXPECT_NE(std::get<PeerEvent>(*event).peer, 1) << std::get<PeerEvent>(*event).reason;
    }
  }
}

// A peer in its own process. It answers messages, and as a worker sends without end. To a peer that
// it lost and found again it sends the reason of the loss.
class Process {
 public:
  explicit Process(const ZmqOptions& options, rlim_t descriptors = 0) : pid_(fork()) {
    if (pid_ != 0) return;
    const rlimit limit{.rlim_cur = descriptors, .rlim_max = descriptors};
    if (descriptors != 0) setrlimit(RLIMIT_NOFILE, &limit);
    const auto plane = StartZmqMessages(options);
    std::string why;
    while (plane.ok()) {
      auto event = (*plane)->Receive(In(milliseconds(1)));
      if (const auto* peer = event.ok() ? std::get_if<PeerEvent>(&*event) : nullptr) {
        if (!why.empty()) (*plane)->Send(peer->peer, 1, why, {}).IgnoreError();
        why = std::string(peer->reason.message());
      }
      auto* message = event.ok() ? std::get_if<Message>(&*event) : nullptr;
      if (message != nullptr) {
        (*plane)->Send(message->peer, 0, "answer", std::move(message->body)).IgnoreError();
      }
      for (const auto& [peer, address] : options.calls) {
        if ((*plane)->bytes_sent() < (size_t{1} << 32)) {
          (*plane)->Send(peer, 0, "m", std::vector<uint8_t>(100000, 3)).IgnoreError();
        }
      }
    }
    _exit(1);
  }
  ~Process() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  void Signal(int signal) const { kill(pid_, signal); }
  bool lives() const { return waitpid(pid_, nullptr, WNOHANG) == 0; }

 private:
  const pid_t pid_;
};

void TakeSome(MessagePlane& plane) {
  for (int i = 0; i < 5; ++i) EXPECT_EQ(NextMessage(plane).body.size(), 100000u);
}

// For peers that are lost by the end of their connections, so that nothing waits for this timeout.
constexpr seconds kLong{60};

// Forks before this process has threads.
TEST(ZmqProcesses, AKilledPeerIsLostWithoutItsTimeout) {
  ZmqMembers members({.timeout = kLong});
  for (int round = 0; round < 5; ++round) {
    const Process worker(members.Options(1, {kServer}));
    const auto server = members.Join(kServer, {});
    ExpectJoined(*server, 1);
    TakeSome(*server);
    worker.Signal(SIGKILL);
    const absl::Status lost = TakeUntilLost(*server, 1);
    EXPECT_EQ(lost.code(), absl::StatusCode::kUnavailable) << lost;
  }
}

TEST(ZmqProcesses, AStoppedPeerIsLostAtItsDeadlineAndJoinsAgainWhenItGoesOn) {
  // Long enough for an overloaded machine, and much shorter than the default of 10 s.
  constexpr milliseconds kTimeout{2000};
  ZmqMembers members({.timeout = kTimeout});
  const Process worker(members.Options(1, {kServer}));
  const auto server = members.Join(kServer, {});
  ExpectJoined(*server, 1);
  const auto begin = Clock::now();
  TakeSome(*server);
  worker.Signal(SIGSTOP);
  const absl::Status lost = TakeUntilLost(*server, 1, In(seconds(9)));
  EXPECT_EQ(lost.code(), absl::StatusCode::kDeadlineExceeded) << lost;
  EXPECT_GE(Clock::now() - begin, kTimeout) << "it was heard after that";
  worker.Signal(SIGCONT);
  ExpectJoined(*server, 1);
  const std::string why = NextMessage(*server).head;
  EXPECT_NE(why.find("since this process was stopped"), std::string::npos) << why;
  TakeSome(*server);
}

TEST(ZmqProcesses, AKilledServerIsFoundAgainAtItsPort) {
  ZmqMembers members({.timeout = kLong});
  // Rank 0 only listens; it calls nobody.
  auto first = std::make_unique<Process>(members.Options(kServer, {}));
  const auto worker = members.Join(1, {kServer});
  ExpectJoined(*worker, kServer);
  first->Signal(SIGKILL);
  EXPECT_EQ(ExpectLost(*worker, kServer).code(), absl::StatusCode::kUnavailable);
  first.reset();
  const auto second = members.Join(kServer, {});
  ExpectJoined(*worker, kServer);
  ExpectJoined(*second, 1);
}

// All members stop for longer than the timeout and continue, as when a virtual machine is moved.
TEST(ZmqProcesses, AMachineThatPausesLosesNobody) {
  constexpr milliseconds kTimeout{2000};
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  const pid_t child = fork();
  if (child == 0) {
    ZmqMembers members({.timeout = kTimeout});
    const auto server = members.Join(kServer, {});
    const auto worker = members.Join(1, {kServer});
    ExpectJoined(*server, 1);
    ExpectJoined(*worker, kServer);
    Deadline before = Clock::now();  // the pause may begin with the write
    bool quiet = write(pipes[1], "r", 1) == 1, paused = false;
    // Runs until the pause, and for a while after it.
    for (Deadline end = Soon(); quiet && Clock::now() < end;) {
      for (MessagePlane* plane : {server.get(), worker.get()}) {
        quiet = quiet && !plane->Receive(In(milliseconds(20))).ok();
      }
      const Deadline now = Clock::now();
      if (!paused && now - before > kTimeout) {
        paused = true;
        end = In(milliseconds(500));
      }
      before = now;
    }
    _exit(quiet && paused && !testing::Test::HasFailure() ? 0 : 1);
  }
  close(pipes[1]);
  char ready;
  EXPECT_EQ(read(pipes[0], &ready, 1), 1);
  kill(child, SIGSTOP);
  std::this_thread::sleep_for(kTimeout + milliseconds(300));
  kill(child, SIGCONT);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  close(pipes[0]);
}

// Idle strangers use up all descriptors until their handshakes time out.
TEST(ZmqProcesses, AServerWithoutDescriptorsKeepsItsMembersAndAdmitsNewOnesLater) {
  ZmqMembers members({});
  const Process server(members.Options(kServer, {}), 120);
  const auto worker = members.Join(1, {kServer});
  ExpectJoined(*worker, kServer);
  const auto expect_answers = [&] {
    ASSERT_TRUE(worker->Send(kServer, 0, "question", std::vector<uint8_t>(1000)).ok());
    EXPECT_EQ(NextMessage(*worker).head, "answer");
  };
  std::deque<Descriptor> held;
  for (int i = 0; i < 300; ++i) held.push_back(Visit(members.PortOf(kServer)));
  for (int i = 0; i < 10; ++i) expect_answers();
  const auto another = members.Join(2, {kServer});
  ExpectJoined(*another, kServer, In(kLong));
  expect_answers();
  EXPECT_TRUE(server.lives());
}

// The peer's owner takes nothing for longer than the timeout, but the plane's thread answers.
TEST_F(ZmqMessages, AnOwnerThatTakesNothingForLongIsNotLost) {
  Start({.timeout = milliseconds(2000)});
  EXPECT_EQ(server_->Receive(In(milliseconds(2500))).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  ExpectUnmoved();
}

TEST_F(ZmqMessages, MembersMeetByIpv6) {
  if (const auto here = LocalAddress("", "::1"); !here.ok() || here->Host() != "::1") {
    GTEST_SKIP() << "no IPv6 on this machine";
  }
  ZmqOptions options;
  options.listens = true;
  options.rendezvous_host = "::1";
  const auto server = *StartZmqMessages(options);
  EXPECT_EQ(server->address().substr(0, 6), "[::1]:");
  ZmqOptions caller;
  caller.rank = 1;
  caller.calls[kServer] = server->address();
  const auto worker = *StartZmqMessages(caller);
  ExpectJoined(*worker, kServer);
  ExpectJoined(*server, 1);
}

TEST_F(ZmqMessages, ItListensOnTheNamedInterface) {
  ZmqOptions options;
  options.listens = true;
  options.interface = "lo";
  const auto plane = StartZmqMessages(options);
  ASSERT_TRUE(plane.ok()) << plane.status();
  EXPECT_EQ((*plane)->address().substr(0, 10), "127.0.0.1:");
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_EQ(limit.rlim_cur, std::min<rlim_t>(limit.rlim_max, rlim_t{1} << 20));
}

}  // namespace
}  // namespace thinwire
