// ZmqLoop: all sockets of one plane, and the thread that uses them, since ZeroMQ's sockets belong
// to one thread. It moves messages between them and a MessageBox.
//
// A member that listens has one ROUTER, in which libzmq gives every connection a routing id of its
// own: an id is never used for a second connection. A member that calls has a DEALER for each peer
// and each attempt; libzmq's own reconnecting is never used, because the new connection would
// silently lack what was in the old one's buffers. So a connection is one TCP connection from its
// greeting to its end, and messages are numbered within it.
//
// The socket's monitor reports the end of a connection. A ROUTER's monitor does not say whose
// connection has ended (it counts strangers' too), so the loop then sends each peer a keep-alive,
// which fails if that peer's connection is gone.
#ifndef THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_LOOP_H_
#define THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_LOOP_H_

#include <cstdint>
#include <map>
#include <memory>
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
#include "transport/mesh/descriptor.h"
#include "transport/messages/message_box.h"
#include "transport/messages/zmq/zmq_frames.h"
#include "transport/messages/zmq/zmq_messages.h"
#include "transport/messages/zmq/zmq_socket.h"

namespace thinwire {

class ZmqLoop {
 public:
  // Opens the sockets; nothing is received before Start. `box` must outlive the loop.
  static absl::StatusOr<std::unique_ptr<ZmqLoop>> Open(const ZmqOptions& options,
                                                       std::shared_ptr<const ZmqLibrary> zmq,
                                                       MessageBox* box);
  ~ZmqLoop() { Stop(false); }

  void Start();
  // Ends the thread. With a goodbye, which takes at most 250 ms, peers learn that this member has
  // left; without one they see their connections end. Only one thread may call it.
  void Stop(bool goodbye);

  // Any thread may call these.
  void Wake();
  void Call(int peer, std::string address);

  const std::string& address() const { return address_; }

 private:
  // A member that has been greeted.
  struct Connection {
    std::string routing_id;  // in the ROUTER; empty: this member called the peer
    Deadline last_heard, last_sent;
    PieceJoiner incoming;
    uint64_t messages_sent = 0;
  };
  // A member that this one calls.
  struct Callee {
    std::string address;
    ZmqSocket dealer, monitor;           // of the attempt in progress, or of the connection
    Deadline next_attempt, give_up;      // without a dealer; with one: the end of the attempt
    std::chrono::milliseconds pause{0};  // before the next attempt
    bool refused = false;
    std::string why;  // why it is not connected
  };

  ZmqLoop(const ZmqOptions& options, std::shared_ptr<const ZmqLibrary> zmq, MessageBox* box);
  absl::Status Listen(const ZmqOptions& options);

  void Run();
  Deadline NextTimer(Deadline now) const;
  void WaitUntil(Deadline deadline);

  // Receiving.
  void AdmitClients();
  void ReadRouter();
  void ReadDealers();
  void ReadDealer(int peer);
  void ReadMonitors();
  void FromStranger(const std::string& routing_id, Bytes frame);
  void OnHello(const std::string& routing_id, Bytes frame);
  void FromCallee(int peer, Bytes frame);
  void FromMember(int peer, Bytes frame);

  // Sending.
  void SendDepartures();
  void SendMessage(int peer, Connection& connection, CreditQueue::Outgoing message);
  void SendSigns(Deadline now);
  // Sends to a member. If its connection is gone, the loop finds out later, as with any peer.
  void SendTo(int peer, Connection& connection, ZmqFrame& frame);
  void SendText(int peer, Connection& connection, const std::string& text);
  bool SendByRouter(const std::string& routing_id, const std::string& text);

  // Peers come and go.
  void Join(int peer, std::string routing_id);
  void Lose(int peer, absl::Status reason);
  void LoseRefusing(int peer, Bytes frame);
  void LoseSilent(Deadline now);
  void LoseGone();
  void TakeCalls();
  void TryCallees(Deadline now);
  absl::Status Try(int peer, Callee& callee);
  // Ends the attempt or connection; the next attempt follows after a pause.
  void HangUp(int peer, Callee& callee, const std::string& why);
  std::string NameOf(int peer) const;

  Greeting GreetingTo(int peer) const;

  const int rank_;
  const MessageLimits limits_;
  const std::chrono::milliseconds interval_;  // between keep-alives
  MessageBox* const box_;
  const std::shared_ptr<const ZmqLibrary> zmq_;
  const Descriptor wake_;
  std::string address_;

  // Used only by the thread once it runs.
  std::unique_ptr<ZmqContext> context_;
  ZmqKeys keys_;
  ZmqSocket admission_, router_, router_monitor_;
  std::map<int, Callee> callees_;
  std::map<int, Connection> connections_;
  std::map<std::string, int> by_routing_id_;
  std::set<int> gone_;            // ZeroMQ did not accept what was sent to them
  Deadline asking_until_{};       // until then keep-alives test which peers are gone
  Deadline was_stopped_until_{};  // a stop of this process explains losses until then
  uint64_t monitors_made_ = 0;
  bool leaving_ = false;

  absl::Mutex mu_;
  std::map<int, std::string> calls_ ABSL_GUARDED_BY(mu_);  // new ones
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  bool goodbye_ ABSL_GUARDED_BY(mu_) = false;

  std::thread thread_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_LOOP_H_
