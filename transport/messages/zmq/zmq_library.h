// ZmqLibrary: the functions of libzmq that the plane calls, found at run time, and the part of its
// ABI that they need, declared here so that building needs no ZeroMQ headers. The ABI is that of
// version 4.3, which later 4.x versions keep.
#ifndef THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_LIBRARY_H_
#define THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_LIBRARY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace thinwire {

struct alignas(void*) ZmqMessage {
  unsigned char opaque[64];
};
static_assert(sizeof(ZmqMessage) == 64);

struct ZmqPollItem {
  void* socket = nullptr;
  int fd = -1;  // used if there is no socket
  short events = 0;
  short revents = 0;
};

inline constexpr short kZmqPollIn = 1;
inline constexpr int kZmqDontWait = 1, kZmqSendMore = 2;
inline constexpr int kZmqIoThreads = 1;  // of a context

enum ZmqSocketType : int { kZmqPair = 0, kZmqRep = 4, kZmqDealer = 5, kZmqRouter = 6 };

enum ZmqOption : int {
  kZmqReceiveMore = 13,
  kZmqLinger = 17,
  kZmqReconnectInterval = 18,
  kZmqBacklog = 19,
  kZmqMaxMessage = 22,  // int64_t; all others are int or text
  kZmqSendHighWater = 23,
  kZmqReceiveHighWater = 24,
  kZmqLastEndpoint = 32,
  kZmqRouterMandatory = 33,
  kZmqIpv6 = 42,
  kZmqCurveServer = 47,
  kZmqCurvePublicKey = 48,
  kZmqCurveSecretKey = 49,
  kZmqCurveServerKey = 50,
  kZmqZapDomain = 55,
  kZmqHandshakeInterval = 66,
  kZmqConnectTimeout = 79,
  kZmqZapEnforceDomain = 93,
};

// Events of a socket monitor.
enum ZmqEvent : uint16_t {
  kZmqConnectRetried = 0x0004,
  kZmqClosed = 0x0080,
  kZmqDisconnected = 0x0200,
  kZmqHandshakeFailed = 0x0800,
  kZmqHandshakeFailedProtocol = 0x2000,
  kZmqHandshakeFailedAuth = 0x4000,
};

// A table of functions under their names in zmq.h, without the prefix.
struct ZmqLibrary {
  std::string version;  // such as "4.3.4"
  std::string path;     // as requested

  int (*error_number)();
  const char* (*strerror)(int);
  void* (*ctx_new)();
  int (*ctx_set)(void* context, int option, int value);
  int (*ctx_term)(void* context);
  void* (*socket)(void* context, int type);
  int (*close)(void* socket);
  int (*setsockopt)(void* socket, int option, const void* value, size_t bytes);
  int (*getsockopt)(void* socket, int option, void* value, size_t* bytes);
  int (*bind)(void* socket, const char* endpoint);
  int (*connect)(void* socket, const char* endpoint);
  int (*socket_monitor)(void* socket, const char* endpoint, int events);
  int (*poll)(ZmqPollItem* items, int count, long timeout_ms);
  int (*msg_init)(ZmqMessage*);
  int (*msg_init_size)(ZmqMessage*, size_t bytes);
  int (*msg_send)(ZmqMessage*, void* socket, int flags);
  int (*msg_recv)(ZmqMessage*, void* socket, int flags);
  int (*msg_close)(ZmqMessage*);
  void* (*msg_data)(ZmqMessage*);
  size_t (*msg_size)(const ZmqMessage*);
  char* (*z85_encode)(char* text, const uint8_t* data, size_t bytes);
  uint8_t* (*z85_decode)(uint8_t* data, const char* text);
  int (*curve_public)(char* public_text, const char* secret_text);
};

// Loads the library, which stays loaded: the file at `path` if one is named, else the dynamic
// linker's libzmq.so.5, else the copy that the wheel pyzmq has beside this library's package.
// Unimplemented, with the fix, if there is none, or it is older than 4.3, lacks a function, or was
// built without CURVE.
absl::StatusOr<std::shared_ptr<const ZmqLibrary>> LoadZmq(const std::string& path);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_LIBRARY_H_
