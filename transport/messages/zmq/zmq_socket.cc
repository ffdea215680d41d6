#include "transport/messages/zmq/zmq_socket.h"

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

// A handshake that takes longer belongs to a stranger.
constexpr int kHandshakeMs = 3000;
// Libzmq reads at most this many frames ahead of the plane's thread.
constexpr int kReceiveAhead = 4;
constexpr char kDomain[] = "thinwire";

Bytes BytesOf(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// The public key of a secret one, converted through text as libzmq's interface requires.
bool PublicOf(const ZmqLibrary& zmq, const ZmqKeys::Key& secret, ZmqKeys::Key* of) {
  char secret_text[41], public_text[41];
  return zmq.z85_encode(secret_text, secret.data(), secret.size()) != nullptr &&
         zmq.curve_public(public_text, secret_text) == 0 &&
         zmq.z85_decode(of->data(), public_text) != nullptr;
}

}  // namespace

absl::StatusOr<ZmqKeys> ZmqKeys::Derive(const ZmqLibrary& zmq, const GroupKey& group) {
  const std::string server = group.Mac("curve server"), client = group.Mac("curve client");
  ZmqKeys keys;
  if (server.size() == sizeof(Key) && client.size() == sizeof(Key)) {
    std::memcpy(keys.server_secret.data(), server.data(), sizeof(Key));
    std::memcpy(keys.client_secret.data(), client.data(), sizeof(Key));
    if (PublicOf(zmq, keys.server_secret, &keys.server_public) &&
        PublicOf(zmq, keys.client_secret, &keys.client_public)) {
      return keys;
    }
  }
  return absl::InternalError("no keys could be derived from the group's key");
}

absl::StatusOr<std::unique_ptr<ZmqContext>> ZmqContext::Make(std::shared_ptr<const ZmqLibrary> zmq,
                                                             int io_threads) {
  void* const context = zmq->ctx_new();
  if (context == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("ZeroMQ gives no context: ", zmq->strerror(zmq->error_number())));
  }
  zmq->ctx_set(context, kZmqIoThreads, io_threads);
  return std::unique_ptr<ZmqContext>(new ZmqContext(std::move(zmq), context));
}

ZmqContext::~ZmqContext() {
  while (zmq_->ctx_term(context_) != 0 && zmq_->error_number() == EINTR) continue;
}

absl::StatusOr<ZmqSocket> ZmqSocket::Open(const ZmqContext& context, ZmqSocketType type) {
  ZmqSocket socket;
  socket.zmq_ = &context.zmq();
  socket.socket_ = context.zmq().socket(context.get(), type);
  if (!socket.valid()) return socket.Failed("no socket");
  for (const ZmqOption option : {kZmqLinger, kZmqSendHighWater, kZmqReceiveHighWater}) {
    if (absl::Status failed = socket.Set(option, 0); !failed.ok()) return failed;
  }
  return socket;
}

absl::Status ZmqSocket::SetUpForMembers(size_t max_frame) {
  const int64_t bytes = static_cast<int64_t>(max_frame);
  absl::Status status = Set(kZmqMaxMessage, Bytes(reinterpret_cast<const uint8_t*>(&bytes), 8));
  status.Update(Set(kZmqReceiveHighWater, kReceiveAhead));
  status.Update(Set(kZmqHandshakeInterval, kHandshakeMs));
  return status;
}

absl::Status ZmqSocket::SecureAsServer(const ZmqKeys& keys) {
  absl::Status status = Set(kZmqCurveServer, 1);
  status.Update(Set(kZmqCurveSecretKey, keys.server_secret));
  // No client is admitted unless a handler admits it.
  status.Update(Set(kZmqZapDomain, BytesOf(kDomain)));
  status.Update(Set(kZmqZapEnforceDomain, 1));
  return status;
}

absl::Status ZmqSocket::SecureAsClient(const ZmqKeys& keys) {
  absl::Status status = Set(kZmqCurveServerKey, keys.server_public);
  status.Update(Set(kZmqCurvePublicKey, keys.client_public));
  status.Update(Set(kZmqCurveSecretKey, keys.client_secret));
  return status;
}

absl::Status ZmqSocket::Set(ZmqOption option, int value) {
  return Set(option, Bytes(reinterpret_cast<const uint8_t*>(&value), sizeof(value)));
}

absl::Status ZmqSocket::Set(ZmqOption option, Bytes value) {
  if (zmq_->setsockopt(socket_, option, value.data(), value.size()) == 0) return absl::OkStatus();
  return Failed(absl::StrCat("option ", static_cast<int>(option)));
}

absl::Status ZmqSocket::Bind(const std::string& endpoint) {
  if (zmq_->bind(socket_, endpoint.c_str()) == 0) return absl::OkStatus();
  return Failed(absl::StrCat("cannot listen on ", endpoint));
}

absl::Status ZmqSocket::Connect(const std::string& endpoint) {
  if (zmq_->connect(socket_, endpoint.c_str()) == 0) return absl::OkStatus();
  return Failed(absl::StrCat("cannot connect to ", endpoint));
}

absl::StatusOr<std::string> ZmqSocket::Endpoint() const {
  char text[256] = {};
  size_t bytes = sizeof(text);
  if (zmq_->getsockopt(socket_, kZmqLastEndpoint, text, &bytes) != 0) return Failed("no endpoint");
  return std::string(text);
}

absl::StatusOr<ZmqSocket> ZmqSocket::Monitor(const ZmqContext& context, const std::string& name,
                                             int events) {
  const std::string endpoint = absl::StrCat("inproc://", name);
  absl::StatusOr<ZmqSocket> reader = Open(context, kZmqPair);
  if (!reader.ok()) return reader;
  if (zmq_->socket_monitor(socket_, endpoint.c_str(), events) != 0) return Failed("no monitor");
  if (absl::Status failed = reader->Connect(endpoint); !failed.ok()) {
    StopMonitor();
    return failed;
  }
  return reader;
}

bool ZmqSocket::Send(ZmqFrame& frame, bool more) {
  return zmq_->msg_send(frame.get(), socket_, kZmqDontWait | (more ? kZmqSendMore : 0)) >= 0;
}

bool ZmqSocket::Receive(ZmqFrame& frame) {
  return zmq_->msg_recv(frame.get(), socket_, kZmqDontWait) >= 0;
}

bool ZmqSocket::MoreFollows() const {
  int more = 0;
  size_t bytes = sizeof(more);
  return zmq_->getsockopt(socket_, kZmqReceiveMore, &more, &bytes) == 0 && more != 0;
}

absl::Status ZmqSocket::Failed(const std::string& what) const {
  return absl::UnavailableError(
      absl::StrCat("ZeroMQ: ", what, ": ", zmq_->strerror(zmq_->error_number())));
}

}  // namespace thinwire
