// GlooLoop and GlooPair: the thread of Gloo's event loop, and Gloo's end of a connection that we
// made and checked, in place of one that Gloo makes. For a newer Gloo only gloo_pair.cc has to
// change.
//
// The loop only tries to lock the connection that an event is about. While a caller holds the lock,
// in a send or receive of its own, the loop skips the event, gets it again at once, and so spins
// for as long as the caller's system call takes: up to 40 % of a core. So only the loop's thread
// calls send or recv, which then can't contend with the loop.
//
// Gloo's own pair listens on a port from its constructor on, and takes the first connection that
// arrives for its peer's; a stranger's bytes then abort the process. It offers no way to hand it a
// connection, but a derived class can do so through its protected members. It also reports the end
// of a transfer or a broken connection only to threads that wait; the derived class sees both as
// they happen. All code that uses Gloo's protected names is in gloo_pair.cc.
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
  // Throws Gloo's exception if no descriptor is left.
  explicit GlooLoop(std::shared_ptr<gloo::transport::tcp::Device> device);
  ~GlooLoop() override;
  GlooLoop(const GlooLoop&) = delete;
  GlooLoop& operator=(const GlooLoop&) = delete;

  // Runs `task` once on the loop's thread, after all tasks posted before. It must neither block nor
  // throw, and what it uses must live until it has run: see Sync. A task that captures a single
  // pointer allocates no memory.
  void Post(std::function<void()> task);

  // Returns when all tasks posted before have run. Don't call it on the loop's thread.
  void Sync();

 private:
  void handleEvents(int events) override;

  const std::shared_ptr<gloo::transport::tcp::Device> device_;
  const int wakeup_;                            // an eventfd that the loop watches
  std::vector<std::function<void()>> running_;  // used on the loop's thread only
  absl::Mutex mu_;
  absl::CondVar ran_;
  std::vector<std::function<void()>> waiting_ ABSL_GUARDED_BY(mu_);
  uint64_t posted_count_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t ran_count_ ABSL_GUARDED_BY(mu_) = 0;
  int syncing_ ABSL_GUARDED_BY(mu_) = 0;
};

// A Gloo context over existing connections to other ranks, by rank, of which it takes ownership.
// `loop` is the device's; `congestion` as in CheckCongestion (mesh/tcp.h). If a connection broke
// meanwhile, the context lacks it and `broken` becomes Unavailable.
std::shared_ptr<gloo::Context> GlooContextOf(int rank, std::vector<Descriptor> connections,
                                             std::shared_ptr<gloo::transport::tcp::Device> device,
                                             GlooLoop& loop, std::chrono::milliseconds timeout,
                                             const std::string& congestion, absl::Status& broken);

bool IsConnected(gloo::Context& context, int peer);

// On the loop's thread: from now on `observer` is called for the events of that connection. The
// last call is OnClosed; `observer` must live until then.
void Observe(gloo::Context& context, int peer, GlooPeer* observer);

// Closes all connections, and returns when the loop has finished with them and has run what their
// observers posted.
void CloseConnections(gloo::Context& context, GlooLoop& loop);

// How many transfers of a buffer have ended since the last call. Does not wait: a wait of Gloo's
// that times out closes all connections. Call it on the loop's thread, which counts them, and only
// for buffers that no thread waits for.
size_t TakeReceived(gloo::transport::UnboundBuffer& buffer);
size_t TakeSent(gloo::transport::UnboundBuffer& buffer);

// True if bytes that were sent to that rank are still under way. They are lost if the connection
// closes now, since Gloo resets it.
bool IsOnItsWay(gloo::Context& context, int peer);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_PAIR_H_
