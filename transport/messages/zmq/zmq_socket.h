// A context, sockets and keys of ZeroMQ as objects, with errors as values. One thread at a time may
// use these objects.
#ifndef THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_SOCKET_H_
#define THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_SOCKET_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/types.h"
#include "transport/mesh/group_key.h"
#include "transport/messages/zmq/zmq_library.h"

namespace thinwire {

// The two key pairs of a group. Every member that listens has the server pair, every member that
// calls has the client pair; so each end knows the other's public key, and no stranger has a key
// that a member admits.
struct ZmqKeys {
  using Key = std::array<uint8_t, 32>;

  Key server_secret, server_public, client_secret, client_public;

  // The secret keys are MACs under the group's key.
  static absl::StatusOr<ZmqKeys> Derive(const ZmqLibrary& zmq, const GroupKey& group);
};

// One frame of a message.
class ZmqFrame {
 public:
  // Empty if there is no memory for `bytes` bytes.
  explicit ZmqFrame(const ZmqLibrary& zmq, size_t bytes = 0) : zmq_(&zmq) {
    if (bytes == 0 || zmq_->msg_init_size(&message_, bytes) != 0) zmq_->msg_init(&message_);
  }
  ~ZmqFrame() { zmq_->msg_close(&message_); }
  ZmqFrame(const ZmqFrame&) = delete;
  ZmqFrame& operator=(const ZmqFrame&) = delete;

  MutableBytes bytes() {
    return {static_cast<uint8_t*>(zmq_->msg_data(&message_)), zmq_->msg_size(&message_)};
  }
  std::string_view text() {
    const MutableBytes all = bytes();
    return {reinterpret_cast<const char*>(all.data()), all.size()};
  }
  ZmqMessage* get() { return &message_; }

 private:
  const ZmqLibrary* const zmq_;
  ZmqMessage message_;
};

class ZmqContext {
 public:
  // Unavailable if the process has no descriptors left.
  static absl::StatusOr<std::unique_ptr<ZmqContext>> Make(std::shared_ptr<const ZmqLibrary> zmq,
                                                          int io_threads);
  // All sockets must be closed before. Waits as long as they linger.
  ~ZmqContext();
  ZmqContext(const ZmqContext&) = delete;
  ZmqContext& operator=(const ZmqContext&) = delete;

  const ZmqLibrary& zmq() const { return *zmq_; }
  void* get() const { return context_; }

 private:
  ZmqContext(std::shared_ptr<const ZmqLibrary> zmq, void* context)
      : zmq_(std::move(zmq)), context_(context) {}

  const std::shared_ptr<const ZmqLibrary> zmq_;
  void* const context_;
};

// A movable value. Linger is 0 unless set, and no send queue has a high-water mark: the plane's
// credit bounds the queued bytes, whereas ZeroMQ would count messages and not tell a ROUTER's
// caller when there is room again.
class ZmqSocket {
 public:
  ZmqSocket() = default;
  static absl::StatusOr<ZmqSocket> Open(const ZmqContext& context, ZmqSocketType type);
  ~ZmqSocket() { Close(); }
  ZmqSocket(ZmqSocket&& other) noexcept { *this = std::move(other); }
  ZmqSocket& operator=(ZmqSocket&& other) noexcept {
    Close();
    zmq_ = other.zmq_;
    socket_ = std::exchange(other.socket_, nullptr);
    return *this;
  }

  bool valid() const { return socket_ != nullptr; }
  void* get() const { return socket_; }
  void Close() {
    if (socket_ != nullptr) zmq_->close(std::exchange(socket_, nullptr));
  }

  // Sets the options that all sockets between members share. `max_frame` in bytes.
  absl::Status SetUpForMembers(size_t max_frame);
  absl::Status SecureAsServer(const ZmqKeys& keys);
  absl::Status SecureAsClient(const ZmqKeys& keys);

  absl::Status Set(ZmqOption option, int value);
  absl::Status Set(ZmqOption option, Bytes value);
  absl::Status Bind(const std::string& endpoint);
  absl::Status Connect(const std::string& endpoint);
  // Returns the endpoint on which it listens.
  absl::StatusOr<std::string> Endpoint() const;

  // Returns another socket on which this one's events arrive. Call StopMonitor before either
  // closes.
  absl::StatusOr<ZmqSocket> Monitor(const ZmqContext& context, const std::string& name, int events);
  void StopMonitor() {
    if (valid()) zmq_->socket_monitor(socket_, nullptr, 0);
  }

  // Neither waits. Send: true if ZeroMQ has taken the frame, which is then empty. Receive: true if
  // there was a frame. MoreFollows: true if more frames of the same message follow.
  bool Send(ZmqFrame& frame, bool more);
  bool Receive(ZmqFrame& frame);
  bool MoreFollows() const;

 private:
  absl::Status Failed(const std::string& what) const;

  const ZmqLibrary* zmq_ = nullptr;
  void* socket_ = nullptr;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_SOCKET_H_
