// GlooLoop and GlooPair: the thread of Gloo's event loop, and Gloo's end of a connection that we
// made and checked, in place of one that Gloo makes. A newer Gloo needs another version of
// gloo_pair.cc, and of nothing else.
//
// The loop only tries the lock of the connection that an event is about. While a caller holds it,
// in a send or receive of its own, the loop skips the event, is handed it again at once, and so
// spins for as long as the caller's system call takes: up to 40 % of a core. So nobody else calls
// send or recv: what is started on the loop's thread can't meet the loop.
//
// Gloo's own pair listens on a port from its constructor on, and takes the first connection that
// comes for its peer's; a stranger's bytes then abort the process. It offers no way to hand it a
// connection, but what it needs is protected, and so open to a derived class. Nor does it tell
// anybody but a thread that waits what has become of a transfer, or that a connection broke; the
// derived class sees both as they happen. All that uses Gloo's protected names is in gloo_pair.cc.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_PAIR_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_PAIR_H_

#include <gloo/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "transport/mesh/descriptor.h"

namespace thinwire {

class GlooPeer;

// Thread-safe.
class GlooLoop final : private gloo::transport::tcp::Handler {
 public:
  // Throws what Gloo does, if no descriptor is left.
  explicit GlooLoop(std::shared_ptr<gloo::transport::tcp::Device> device);
  ~GlooLoop() override;
  GlooLoop(const GlooLoop&) = delete;
  GlooLoop& operator=(const GlooLoop&) = delete;

  // Runs `task` once on the loop's thread, after those that were posted before. It must neither
  // block nor throw, and what it touches must live until it has run: see Sync. One that captures a
  // single pointer takes no memory of its own.
  void Post(std::function<void()> task);

  // Returns when all that was posted before has run. Not on the loop's thread.
  void Sync();

 private:
  void handleEvents(int events) override;

  const std::shared_ptr<gloo::transport::tcp::Device> device_;
  const int wakeup_;                            // an eventfd that the loop watches
  std::vector<std::function<void()>> running_;  // the loop's thread's own
  absl::Mutex mu_;
  absl::CondVar ran_;
  std::vector<std::function<void()>> waiting_ ABSL_GUARDED_BY(mu_);
  uint64_t posted_count_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t ran_count_ ABSL_GUARDED_BY(mu_) = 0;
  int syncing_ ABSL_GUARDED_BY(mu_) = 0;
};

// A context of Gloo over the connections that there are with other ranks, by rank, of which it
// takes possession. `loop` is the device's; `congestion` as in CheckCongestion (mesh/tcp.h).
// `broken` becomes Unavailable if one broke meanwhile, which the context lacks then.
std::shared_ptr<gloo::Context> GlooContextOf(int rank, std::vector<Descriptor> connections,
                                             std::shared_ptr<gloo::transport::tcp::Device> device,
                                             GlooLoop& loop, std::chrono::milliseconds timeout,
                                             const std::string& congestion, absl::Status& broken);

bool IsConnected(gloo::Context& context, int peer);

// On the loop's thread: from here on `observer` hears what happens to that connection, the last
// time by OnClosed, until which it lives.
void Observe(gloo::Context& context, int peer, GlooPeer* observer);

// Closes all connections, and returns when the loop has nothing more to do with them, nor with what
// their observers posted.
void CloseConnections(gloo::Context& context, GlooLoop& loop);

// How many of a buffer's transfers have ended since the last call, asked without waiting: a wait of
// Gloo's that finds nothing in time closes all connections. On the loop's thread, which counts
// them, and only for buffers that nobody waits on.
size_t TakeReceived(gloo::transport::UnboundBuffer& buffer);
size_t TakeSent(gloo::transport::UnboundBuffer& buffer);

// True if bytes that were sent to that rank are still on their way. They are lost if the connection
// closes now, since Gloo resets it.
bool IsOnItsWay(gloo::Context& context, int peer);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_PAIR_H_
