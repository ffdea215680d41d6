#include "transport/messages/zmq/zmq_loop.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "transport/mesh/group_key.h"
#include "transport/mesh/tcp.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;

// Between attempts to connect.
constexpr milliseconds kFirstPause{20}, kLongestPause{500};
// From the attempt to the answer; a handshake may take 3 s.
constexpr milliseconds kAttempt{5000};
constexpr int kConnectMs = 3000;
// Libzmq would reconnect after this time; the loop closes the socket earlier.
constexpr int kNeverMs = 3600 * 1000;
constexpr milliseconds kGoodbye{250};
// After a connection has ended: how long and how often members are probed to find whose it was.
// ZeroMQ's threads report the end some microseconds before sending fails.
constexpr milliseconds kAsking{100}, kAskingInterval{2};
// Frames of one kind that are read before the loop looks at the other kinds.
constexpr int kFramesAtOnce = 256;
constexpr int kBacklog = 1024;
constexpr char kAdmissionEndpoint[] = "inproc://zeromq.zap.01";

Bytes BytesOf(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

std::string WithPort(const std::string& host, const std::string& port) {
  return absl::StrContains(host, ':') ? absl::StrCat("[", host, "]:", port)
                                      : absl::StrCat(host, ":", port);
}

}  // namespace

ZmqLoop::ZmqLoop(const ZmqOptions& options, std::shared_ptr<const ZmqLibrary> zmq, MessageBox* box)
    : rank_(options.rank),
      limits_(options.limits),
      interval_(std::clamp(options.limits.timeout / 4, milliseconds(5), milliseconds(1000))),
      box_(box),
      zmq_(std::move(zmq)),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

absl::StatusOr<std::unique_ptr<ZmqLoop>> ZmqLoop::Open(const ZmqOptions& options,
                                                       std::shared_ptr<const ZmqLibrary> zmq,
                                                       MessageBox* box) {
  std::unique_ptr<ZmqLoop> loop(new ZmqLoop(options, zmq, box));
  if (!loop->wake_.valid()) {
    return absl::UnavailableError(absl::StrCat("no eventfd: ", std::strerror(errno)));
  }
  auto context = ZmqContext::Make(zmq, options.listens ? 2 : 1);
  if (!context.ok()) return context.status();
  loop->context_ = *std::move(context);
  const absl::StatusOr<ZmqKeys> keys = ZmqKeys::Derive(*zmq, options.key);
  if (!keys.ok()) return keys.status();
  loop->keys_ = *keys;
  if (options.listens) {
    if (absl::Status failed = loop->Listen(options); !failed.ok()) return failed;
  }
  for (const auto& [peer, address] : options.calls) loop->Call(peer, address);
  return loop;
}

absl::Status ZmqLoop::Listen(const ZmqOptions& options) {
  const absl::StatusOr<Address> local = LocalAddress(options.interface, options.rendezvous_host);
  if (!local.ok()) return local.status();
  // Libzmq's threads request admission from the first connection on.
  absl::StatusOr<ZmqSocket> admission = ZmqSocket::Open(*context_, kZmqRep);
  if (!admission.ok()) return admission.status();
  if (absl::Status failed = admission->Bind(kAdmissionEndpoint); !failed.ok()) return failed;
  admission_ = *std::move(admission);

  absl::StatusOr<ZmqSocket> router = ZmqSocket::Open(*context_, kZmqRouter);
  if (!router.ok()) return router.status();
  router_ = *std::move(router);
  const std::string host = local->Host();
  absl::Status status = router_.SetUpForMembers(kMostFrameBytes);
  status.Update(router_.SecureAsServer(keys_));
  status.Update(router_.Set(kZmqRouterMandatory, 1));
  status.Update(router_.Set(kZmqBacklog, kBacklog));
  if (absl::StrContains(host, ':')) status.Update(router_.Set(kZmqIpv6, 1));
  if (!status.ok()) return status;
  absl::StatusOr<ZmqSocket> monitor = router_.Monitor(*context_, "router", kZmqDisconnected);
  if (!monitor.ok()) return monitor.status();
  router_monitor_ = *std::move(monitor);
  const std::string port = options.port == 0 ? "*" : absl::StrCat(options.port);
  if (absl::Status failed = router_.Bind(absl::StrCat("tcp://", WithPort(host, port)));
      !failed.ok()) {
    return failed;
  }
  const absl::StatusOr<std::string> endpoint = router_.Endpoint();
  if (!endpoint.ok()) return endpoint.status();
  address_ = endpoint->substr(absl::string_view("tcp://").size());
  return absl::OkStatus();
}

// All signals are blocked in the loop's thread: the process's other threads handle them.
void ZmqLoop::Start() {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { Run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void ZmqLoop::Stop(bool goodbye) {
  {
    const absl::MutexLock lock(&mu_);
    stop_ = true;
    goodbye_ = goodbye;
  }
  Wake();
  if (thread_.joinable()) thread_.join();
  // Needed even without a thread: sockets must close before their context is destroyed.
  for (auto& [peer, callee] : callees_) callee.dealer.StopMonitor();
  callees_.clear();
  router_.StopMonitor();
  router_monitor_.Close();
  router_.Close();
  admission_.Close();
  context_.reset();
}

void ZmqLoop::Wake() {
  const uint64_t one = 1;
  // The write fails only if the loop is awake anyway.
  static_cast<void>(!write(wake_.fd(), &one, sizeof(one)));
}

void ZmqLoop::Call(int peer, std::string address) {
  {
    const absl::MutexLock lock(&mu_);
    calls_[peer] = std::move(address);
  }
  Wake();
}

void ZmqLoop::Run() {
  Deadline leave_until{};
  Deadline last_round = Clock::now();
  for (;;) {
    bool stop = false, goodbye = false;
    {
      const absl::MutexLock lock(&mu_);
      stop = stop_;
      goodbye = goodbye_;
    }
    if (stop && !goodbye) return;
    if (stop && !leaving_) {
      leaving_ = true;
      leave_until = Clock::now() + kGoodbye;
      for (auto& [peer, connection] : connections_) {
        SendText(peer, connection, PlainFrame(FrameKind::kGoodbye));
      }
    }
    // Peers answer a goodbye with a goodbye, or hang up.
    if (leaving_ && (connections_.empty() || Clock::now() >= leave_until)) break;

    WaitUntil(leaving_ ? std::min(leave_until, NextTimer(Clock::now())) : NextTimer(Clock::now()));
    const Deadline now = Clock::now();
    // If this process was stopped, it has received nothing, which is not its peers' fault.
    if (now - last_round > limits_.timeout / 2) {
      for (auto& [peer, connection] : connections_) connection.last_heard = now;
      was_stopped_until_ = now + limits_.timeout;
    }
    last_round = now;

    AdmitClients();
    ReadRouter();
    ReadDealers();
    ReadMonitors();
    SendDepartures();
    SendSigns(now);
    LoseSilent(now);
    LoseGone();
    if (!leaving_) {
      TakeCalls();
      TryCallees(now);
    }
  }
  // Frames to members that have not answered get a short time to leave.
  const int linger = static_cast<int>(kGoodbye.count());
  if (router_.valid()) router_.Set(kZmqLinger, linger).IgnoreError();
}

Deadline ZmqLoop::NextTimer(Deadline now) const {
  Deadline next = now + interval_;
  if (now < asking_until_) next = now + kAskingInterval;
  for (const auto& [peer, connection] : connections_) {
    next =
        std::min({next, connection.last_sent + interval_, connection.last_heard + limits_.timeout});
  }
  for (const auto& [peer, callee] : callees_) {
    if (leaving_ || callee.refused || connections_.contains(peer)) continue;
    next = std::min(next, callee.dealer.valid() ? callee.give_up : callee.next_attempt);
  }
  return next;
}

void ZmqLoop::WaitUntil(Deadline deadline) {
  std::vector<ZmqPollItem> items = {{.fd = wake_.fd(), .events = kZmqPollIn}};
  const auto add = [&](const ZmqSocket& socket) {
    if (socket.valid()) items.push_back({.socket = socket.get(), .events = kZmqPollIn});
  };
  add(admission_);
  add(router_);
  add(router_monitor_);
  for (const auto& [peer, callee] : callees_) {
    add(callee.dealer);
    add(callee.monitor);
  }
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
  zmq_->poll(items.data(), static_cast<int>(items.size()),
             std::max<long>(0, static_cast<long>(left.count())));
  uint64_t count = 0;
  static_cast<void>(!read(wake_.fd(), &count, sizeof(count)));
}

// ZeroMQ's authentication protocol (RFC 27): libzmq asks, in seven frames, about every client that
// has completed CURVE's handshake. Only the key that the group's clients share is admitted.
void ZmqLoop::AdmitClients() {
  for (int i = 0; admission_.valid() && i < kFramesAtOnce; ++i) {
    std::vector<std::string> request;
    do {
      ZmqFrame frame(*zmq_);
      if (!admission_.Receive(frame)) return;
      request.emplace_back(frame.text());
    } while (admission_.MoreFollows());
    if (request.size() < 2) request.resize(2);
    const std::string_view key(reinterpret_cast<const char*>(keys_.client_public.data()),
                               keys_.client_public.size());
    const bool admitted =
        request.size() == 7 && request[5] == "CURVE" && SameBytes(request[6], key);
    const std::string answer[] = {
        "1.0", request[1], admitted ? "200" : "400", admitted ? "OK" : "not of this group", "", ""};
    for (size_t part = 0; part < std::size(answer); ++part) {
      ZmqFrame frame(*zmq_, answer[part].size());
      std::ranges::copy(answer[part], frame.bytes().begin());
      admission_.Send(frame, part + 1 < std::size(answer));
    }
  }
}

void ZmqLoop::ReadRouter() {
  for (int i = 0; router_.valid() && i < kFramesAtOnce; ++i) {
    ZmqFrame id(*zmq_);
    if (!router_.Receive(id)) return;
    const std::string routing_id(id.text());
    ZmqFrame frame(*zmq_);
    int frames = 0;
    while (router_.MoreFollows() && router_.Receive(frame)) ++frames;
    if (frames != 1) continue;  // not sent by this protocol
    const auto known = by_routing_id_.find(routing_id);
    if (known == by_routing_id_.end()) {
      FromStranger(routing_id, frame.bytes());
    } else {
      FromMember(known->second, frame.bytes());
    }
  }
}

void ZmqLoop::ReadDealers() {
  std::vector<int> peers;
  for (const auto& [peer, callee] : callees_) peers.push_back(peer);
  for (const int peer : peers) ReadDealer(peer);
}

void ZmqLoop::ReadDealer(int peer) {
  Callee& callee = callees_[peer];
  // The loop may hang up in between.
  for (int i = 0; callee.dealer.valid() && i < kFramesAtOnce; ++i) {
    ZmqFrame frame(*zmq_);
    if (!callee.dealer.Receive(frame)) break;
    if (callee.dealer.MoreFollows()) {
      while (callee.dealer.MoreFollows() && callee.dealer.Receive(frame)) continue;
      continue;  // not sent by this protocol
    }
    if (connections_.contains(peer)) {
      FromMember(peer, frame.bytes());
    } else {
      FromCallee(peer, frame.bytes());
    }
  }
}

void ZmqLoop::ReadMonitors() {
  const auto next_event = [this](ZmqSocket& monitor, uint16_t* event) {
    ZmqFrame frame(*zmq_);
    if (!monitor.valid() || !monitor.Receive(frame)) return false;
    if (frame.bytes().size() >= sizeof(*event)) {
      std::memcpy(event, frame.bytes().data(), sizeof(*event));
    }
    while (monitor.MoreFollows() && monitor.Receive(frame)) continue;
    return true;
  };
  uint16_t event = 0;
  for (int i = 0; i < kFramesAtOnce && next_event(router_monitor_, &event); ++i) {
    asking_until_ = Clock::now() + kAsking;
  }
  for (auto& [peer, callee] : callees_) {
    std::string why;
    while (why.empty() && next_event(callee.monitor, &event)) {
      switch (event) {
        case kZmqHandshakeFailedAuth: why = "it does not admit this group's key"; break;
        case kZmqHandshakeFailed:
        case kZmqHandshakeFailedProtocol:
          why = "the handshake failed, as it does with another key";
          break;
        case kZmqDisconnected: why = "the connection ended"; break;
        default: why = "no connection could be made"; break;
      }
    }
    if (why.empty()) continue;
    ReadDealer(peer);  // frames from before the end, such as a goodbye
    if (!callee.dealer.valid()) continue;
    if (connections_.contains(peer)) {
      Lose(peer, absl::UnavailableError(absl::StrCat(NameOf(peer), " is gone: ", why)));
    } else {
      HangUp(peer, callee, why);
    }
  }
}

// The sender has passed CURVE, so it is a member, but was not greeted yet, or was lost.
void ZmqLoop::FromStranger(const std::string& routing_id, Bytes frame) {
  switch (KindOf(frame).value_or(FrameKind::kReset)) {
    case FrameKind::kHello: OnHello(routing_id, frame); break;
    case FrameKind::kReset: break;
    case FrameKind::kGoodbye: SendByRouter(routing_id, PlainFrame(FrameKind::kGoodbye)); break;
    default: SendByRouter(routing_id, PlainFrame(FrameKind::kReset)); break;
  }
}

void ZmqLoop::OnHello(const std::string& routing_id, Bytes frame) {
  if (leaving_) return;
  const std::optional<Greeting> greeting = ReadGreeting(frame);
  absl::Status wrong = greeting.has_value()
                           ? greeting->Check(rank_, limits_)
                           : absl::FailedPreconditionError("the greeting can't be read");
  if (wrong.ok() && greeting->from == rank_) {
    wrong = absl::FailedPreconditionError(
        absl::StrCat("rank ", rank_, " is this member's own rank; give each its own"));
  }
  if (wrong.ok() && callees_.contains(greeting->from)) {
    wrong = absl::FailedPreconditionError(
        absl::StrCat("rank ", rank_, " and rank ", greeting->from,
                     " call each other; let only one of the two call"));
  }
  if (!wrong.ok()) {
    SendByRouter(routing_id, RefusedFrame(std::string(wrong.message())));
    return;
  }
  if (connections_.contains(greeting->from)) {
    // If the old one is alive, it is another process with the same rank, and must not call again.
    SendText(greeting->from, connections_.at(greeting->from),
             RefusedFrame(absl::StrCat("another member has come as rank ", greeting->from)));
    Lose(greeting->from,
         absl::UnavailableError(absl::StrCat("rank ", greeting->from, " has connected anew")));
  }
  if (SendByRouter(routing_id, WelcomeFrame(GreetingTo(greeting->from)))) {
    Join(greeting->from, routing_id);
  }
}

void ZmqLoop::FromCallee(int peer, Bytes frame) {
  Callee& callee = callees_[peer];
  switch (KindOf(frame).value_or(FrameKind::kReset)) {
    case FrameKind::kWelcome: {
      const std::optional<Greeting> greeting = ReadGreeting(frame);
      if (greeting.has_value() && greeting->from == peer && greeting->Check(rank_, limits_).ok()) {
        Join(peer, "");
        return;
      }
      HangUp(peer, callee, "it answered with a greeting that is not for this member");
      return;
    }
    case FrameKind::kRefused: LoseRefusing(peer, frame); return;
    default: HangUp(peer, callee, "it did not answer the greeting"); return;
  }
}

void ZmqLoop::FromMember(int peer, Bytes frame) {
  Connection& connection = connections_.at(peer);
  connection.last_heard = Clock::now();
  absl::Status broken;
  switch (KindOf(frame).value_or(FrameKind::kHello)) {
    case FrameKind::kPiece: {
      absl::StatusOr<std::optional<Message>> message =
          connection.incoming.Take(frame, limits_, box_->TakenFrom(peer));
      broken = message.status();
      if (broken.ok() && message->has_value()) box_->Add(**std::move(message));
      break;
    }
    case FrameKind::kTaken: {
      const std::optional<uint64_t> taken = ReadTaken(frame);
      if (!taken.has_value() || !box_->Acknowledge(peer, *taken)) {
        broken = absl::DataLossError("it has taken more than was sent");
      }
      break;
    }
    case FrameKind::kAlive: break;
    case FrameKind::kGoodbye:
      SendText(peer, connection, PlainFrame(FrameKind::kGoodbye));
      Lose(peer, absl::CancelledError(absl::StrCat(NameOf(peer), " has left the store")));
      return;
    case FrameKind::kRefused: LoseRefusing(peer, frame); return;
    case FrameKind::kReset:
      Lose(peer,
           absl::UnavailableError(absl::StrCat(NameOf(peer), " has given this connection up")));
      return;
    default: broken = absl::DataLossError("it has sent a frame that has no place here"); break;
  }
  if (broken.ok()) return;
  // A DEALER hangs up, which tells the peer the same.
  const std::string routing_id = connection.routing_id;
  Lose(peer, absl::Status(broken.code(), absl::StrCat(NameOf(peer), ": ", broken.message())));
  if (!routing_id.empty()) SendByRouter(routing_id, PlainFrame(FrameKind::kReset));
}

void ZmqLoop::SendDepartures() {
  for (MessageBox::Departure& departure : box_->Collect()) {
    const auto found = connections_.find(departure.peer);
    if (found == connections_.end()) continue;
    if (departure.taken.has_value()) {
      SendText(departure.peer, found->second, TakenFrame(*departure.taken));
    }
    for (CreditQueue::Outgoing& message : departure.messages) {
      SendMessage(departure.peer, found->second, std::move(message));
    }
  }
}

void ZmqLoop::SendMessage(int peer, Connection& connection, CreditQueue::Outgoing message) {
  PieceCutter pieces(connection.messages_sent++, std::move(message));
  do {
    ZmqFrame frame(*zmq_, pieces.next_bytes());
    if (frame.bytes().size() != pieces.next_bytes()) {
      gone_.insert(peer);  // no memory for the frame
      return;
    }
    pieces.WriteNext(frame.bytes().data());
    SendTo(peer, connection, frame);
  } while (!pieces.done());
}

void ZmqLoop::SendSigns(Deadline now) {
  const bool asking = now < asking_until_;
  for (auto& [peer, connection] : connections_) {
    if (now - connection.last_sent >= interval_ || (asking && !connection.routing_id.empty())) {
      SendText(peer, connection, PlainFrame(FrameKind::kAlive));
    }
  }
}

void ZmqLoop::SendTo(int peer, Connection& connection, ZmqFrame& frame) {
  bool sent = false;
  if (connection.routing_id.empty()) {
    sent = callees_[peer].dealer.Send(frame, false);
  } else {
    ZmqFrame id(*zmq_, connection.routing_id.size());
    std::ranges::copy(BytesOf(connection.routing_id), id.bytes().begin());
    sent = router_.Send(id, true) && router_.Send(frame, false);
  }
  if (!sent) gone_.insert(peer);
  connection.last_sent = Clock::now();
}

void ZmqLoop::SendText(int peer, Connection& connection, const std::string& text) {
  ZmqFrame frame(*zmq_, text.size());
  std::ranges::copy(BytesOf(text).first(frame.bytes().size()), frame.bytes().begin());
  SendTo(peer, connection, frame);
}

bool ZmqLoop::SendByRouter(const std::string& routing_id, const std::string& text) {
  ZmqFrame id(*zmq_, routing_id.size()), frame(*zmq_, text.size());
  std::ranges::copy(BytesOf(routing_id).first(id.bytes().size()), id.bytes().begin());
  std::ranges::copy(BytesOf(text).first(frame.bytes().size()), frame.bytes().begin());
  return router_.Send(id, true) && router_.Send(frame, false);
}

void ZmqLoop::Join(int peer, std::string routing_id) {
  const Deadline now = Clock::now();
  if (!routing_id.empty()) by_routing_id_[routing_id] = peer;
  connections_.insert_or_assign(peer, Connection{.routing_id = std::move(routing_id),
                                                 .last_heard = now,
                                                 .last_sent = now,
                                                 .incoming = PieceJoiner(peer)});
  if (const auto callee = callees_.find(peer); callee != callees_.end()) {
    callee->second.pause = milliseconds(0);
  }
  gone_.erase(peer);
  box_->Join(peer);
}

void ZmqLoop::Lose(int peer, absl::Status reason) {
  if (absl::IsUnavailable(reason) && Clock::now() < was_stopped_until_) {
    reason = absl::UnavailableError(absl::StrCat(
        reason.message(), ", since this process was stopped, and members that are silent for ",
        limits_.timeout.count(), " ms are given up; start it again"));
  }
  if (const auto found = connections_.find(peer); found != connections_.end()) {
    by_routing_id_.erase(found->second.routing_id);
    connections_.erase(found);
  }
  gone_.erase(peer);
  if (const auto callee = callees_.find(peer); callee != callees_.end()) {
    HangUp(peer, callee->second, std::string(reason.message()));
  }
  box_->Lose(peer, std::move(reason));
}

void ZmqLoop::LoseRefusing(int peer, Bytes frame) {
  if (const auto callee = callees_.find(peer); callee != callees_.end()) {
    callee->second.refused = true;
  }
  Lose(peer, absl::FailedPreconditionError(absl::StrCat(NameOf(peer), " has refused rank ", rank_,
                                                        ": ", ReadRefusal(frame))));
}

void ZmqLoop::LoseSilent(Deadline now) {
  std::vector<int> silent;
  for (const auto& [peer, connection] : connections_) {
    if (now - connection.last_heard >= limits_.timeout) silent.push_back(peer);
  }
  for (const int peer : silent) {
    Lose(peer, absl::DeadlineExceededError(absl::StrCat("nothing came from ", NameOf(peer), " for ",
                                                        limits_.timeout.count(),
                                                        " ms: it is stopped, or cut off")));
  }
}

// First reads the frames that they sent earlier.
void ZmqLoop::LoseGone() {
  if (gone_.empty()) return;
  ReadRouter();
  for (const int peer : std::exchange(gone_, {})) {
    if (!connections_.contains(peer)) continue;
    Lose(peer,
         absl::UnavailableError(absl::StrCat(NameOf(peer), " is gone: the connection ended")));
  }
}

void ZmqLoop::TakeCalls() {
  std::map<int, std::string> calls;
  {
    const absl::MutexLock lock(&mu_);
    calls.swap(calls_);
  }
  for (auto& [peer, address] : calls) {
    if (connections_.contains(peer)) {
      if (callees_.contains(peer) && callees_[peer].address == address) continue;
      Lose(peer, absl::UnavailableError(absl::StrCat(NameOf(peer), " has a new address")));
    }
    Callee& callee = callees_[peer];
    if (callee.dealer.valid()) HangUp(peer, callee, "it has a new address");
    callee.address = address;
    callee.refused = false;
    callee.pause = milliseconds(0);
    callee.next_attempt = Clock::now();
    box_->SetMissing(peer, absl::StrCat(address, " has not answered yet"));
  }
}

void ZmqLoop::TryCallees(Deadline now) {
  for (auto& [peer, callee] : callees_) {
    if (callee.refused || connections_.contains(peer)) continue;
    if (callee.dealer.valid()) {
      if (now >= callee.give_up) HangUp(peer, callee, "it did not answer");
    } else if (now >= callee.next_attempt) {
      if (const absl::Status failed = Try(peer, callee); !failed.ok()) {
        HangUp(peer, callee, std::string(failed.message()));
      }
    }
  }
}

absl::Status ZmqLoop::Try(int peer, Callee& callee) {
  absl::StatusOr<ZmqSocket> dealer = ZmqSocket::Open(*context_, kZmqDealer);
  if (!dealer.ok()) return dealer.status();
  absl::Status status = dealer->SetUpForMembers(kMostFrameBytes);
  status.Update(dealer->SecureAsClient(keys_));
  status.Update(dealer->Set(kZmqReconnectInterval, kNeverMs));
  status.Update(dealer->Set(kZmqConnectTimeout, kConnectMs));
  if (absl::StartsWith(callee.address, "[")) status.Update(dealer->Set(kZmqIpv6, 1));
  if (!status.ok()) return status;
  absl::StatusOr<ZmqSocket> monitor =
      dealer->Monitor(*context_, absl::StrCat("dealer-", monitors_made_++),
                      kZmqConnectRetried | kZmqClosed | kZmqDisconnected | kZmqHandshakeFailed |
                          kZmqHandshakeFailedProtocol | kZmqHandshakeFailedAuth);
  if (!monitor.ok()) return monitor.status();
  callee.dealer = *std::move(dealer);
  callee.monitor = *std::move(monitor);
  callee.give_up = Clock::now() + kAttempt;
  if (absl::Status failed = callee.dealer.Connect(absl::StrCat("tcp://", callee.address));
      !failed.ok()) {
    return failed;
  }
  const std::string hello = HelloFrame(GreetingTo(peer));
  ZmqFrame frame(*zmq_, hello.size());
  std::ranges::copy(BytesOf(hello).first(frame.bytes().size()), frame.bytes().begin());
  return callee.dealer.Send(frame, false) ? absl::OkStatus()
                                          : absl::UnavailableError("ZeroMQ took no greeting");
}

void ZmqLoop::HangUp(int peer, Callee& callee, const std::string& why) {
  callee.dealer.StopMonitor();
  callee.monitor.Close();
  callee.dealer.Close();
  callee.pause = std::clamp(callee.pause * 2, kFirstPause, kLongestPause);
  callee.next_attempt = Clock::now() + callee.pause;
  box_->SetMissing(peer, absl::StrCat(callee.address, ": ", why));
}

std::string ZmqLoop::NameOf(int peer) const {
  const auto callee = callees_.find(peer);
  return callee == callees_.end() ? absl::StrCat("rank ", peer)
                                  : absl::StrCat("rank ", peer, " at ", callee->second.address);
}

Greeting ZmqLoop::GreetingTo(int peer) const {
  return {.protocol = kMessageProtocol,
          .from = rank_,
          .to = peer,
          .credit = limits_.credit,
          .max_message = limits_.max_message,
          .timeout_ms = static_cast<uint32_t>(limits_.timeout.count())};
}

}  // namespace thinwire
