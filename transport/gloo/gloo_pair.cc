#include "transport/gloo/gloo_pair.h"

#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/pair.h>
#include <gloo/transport/tcp/unbound_buffer.h>
#include <linux/sockios.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "transport/gloo/gloo_links.h"
#include "transport/mesh/tcp.h"

namespace thinwire {
namespace {

namespace tcp = gloo::transport::tcp;

int MakeWakeup() {
  const int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (fd < 0) throw std::runtime_error("no event descriptor is left for this process");
  return fd;
}

// A socket that a forked child does not keep. Otherwise peers would notice the death of this
// process only when its children have ended too.
class ClosedInChildren {
 public:
  explicit ClosedInChildren(int socket) : socket_(socket), inode_(InodeOf(socket)) {
    const absl::MutexLock lock(&All().mu);
    All().sockets.insert(this);
  }
  ~ClosedInChildren() {
    const absl::MutexLock lock(&All().mu);
    All().sockets.erase(this);
  }
  ClosedInChildren(const ClosedInChildren&) = delete;
  ClosedInChildren& operator=(const ClosedInChildren&) = delete;

 private:
  struct Sockets {
    absl::Mutex mu;  // held while the process forks
    std::set<const ClosedInChildren*> sockets ABSL_GUARDED_BY(mu);
  };

  static Sockets& All() {
    static Sockets* const all = [] {
      pthread_atfork(Lock, Unlock, CloseAll);
      return new Sockets;
    }();
    return *all;
  }

  static void Lock() ABSL_NO_THREAD_SAFETY_ANALYSIS { All().mu.Lock(); }
  static void Unlock() ABSL_NO_THREAD_SAFETY_ANALYSIS { All().mu.Unlock(); }

  // Runs in the child, where only async-signal-safe calls are allowed. Gloo closes a socket before
  // its pair is destroyed, and its number may belong to another file by now.
  static void CloseAll() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (const ClosedInChildren* each : All().sockets) {
      const bool is_here = each->inode_ != 0 && InodeOf(each->socket_) == each->inode_;
      if (is_here) ::close(each->socket_);
    }
    new (&All().mu) absl::Mutex;  // its waiting threads do not exist here
  }

  static ino_t InodeOf(int socket) {
    struct stat about {};
    return fstat(socket, &about) == 0 && S_ISSOCK(about.st_mode) ? about.st_ino : 0;
  }

  const int socket_;
  const ino_t inode_;  // unique to a socket in the whole kernel
};

class GlooPair final : public tcp::Pair {
 public:
  // On the loop's thread. The base class has begun to listen when this runs, but only that thread
  // could accept a connection there, so none is accepted before the socket is closed.
  GlooPair(tcp::Context* context, tcp::Device* device, int peer, std::chrono::milliseconds timeout,
           Descriptor connection, const std::string& congestion)
      : tcp::Pair(context, device, peer, timeout),
        socket_(connection.fd()),
        closed_in_children_(socket_) {
    ChooseCongestion(socket_, congestion);
    device_->unregisterDescriptor(fd_, this);
    ::close(fd_);
    fd_ = socket_;
    try {
      handleConnected();
      connection.Release();
    } catch (...) {
      fd_ = -1;  // else the base class closes it too, and aborts if the loop lacks it
      throw;
    }
  }

  void Observe(GlooPeer* observer) {
    observer_ = observer;
    if (!open_) TellClosed();
  }

  // If the connection closes meanwhile, its descriptor may already belong to another one, and the
  // answer is about that one, which does no harm.
  bool IsOnItsWay() const {
    int unacknowledged = 0;
    return open_ && ioctl(socket_, SIOCOUTQ, &unacknowledged) == 0 && unacknowledged > 0;
  }

  // The loop may have fetched an event before another event's handler closed this connection, which
  // the base class would take for a bug.
  void handleEvents(int events) override {
    if (open_) tcp::Pair::handleEvents(events);
  }

 private:
  void handleReadWrite(int events) override {
    tcp::Pair::handleReadWrite(events);
    if (GlooPeer* const observer = observer_) observer->OnProgress();
  }

  void changeState(state next) noexcept override {
    tcp::Pair::changeState(next);
    if (next != CLOSED) return;
    open_ = false;
    TellClosed();
  }

  void TellClosed() {
    GlooPeer* const observer = observer_.exchange(nullptr);
    if (observer != nullptr) observer->OnClosed(Why());
  }

  // Gloo stores the reason before it closes. There is none if this side closed.
  std::string Why() {
    try {
      throwIfException();
      return "closed by this rank";
    } catch (const std::exception& error) {
      return error.what();
    }
  }

  const int socket_;
  const ClosedInChildren closed_in_children_;
  std::atomic<bool> open_{true};
  std::atomic<GlooPeer*> observer_{nullptr};
};

GlooPair& PairWith(gloo::Context& context, int peer) {
  return static_cast<GlooPair&>(*context.getPair(peer));
}

class TransportContext final : public tcp::Context {
 public:
  using tcp::Context::Context;

  void Adopt(int peer, Descriptor connection, const std::string& congestion) {
    pairs_[peer] = std::make_unique<GlooPair>(this, device_.get(), peer, getTimeout(),
                                              std::move(connection), congestion);
  }
};

class Context final : public gloo::Context {
 public:
  Context(int rank, int size, std::shared_ptr<tcp::Device> device,
          std::shared_ptr<TransportContext> transport)
      : gloo::Context(rank, size) {
    device_ = std::move(device);
    transportContext_ = std::move(transport);
  }
};

// Never instantiated: it only names members that a derived class may access in any buffer.
struct Counts : tcp::UnboundBuffer {
  static constexpr int tcp::UnboundBuffer::*kReceived = &Counts::recvCompletions_;
  static constexpr int tcp::UnboundBuffer::*kSent = &Counts::sendCompletions_;
};

size_t Take(gloo::transport::UnboundBuffer& buffer, int tcp::UnboundBuffer::*count) {
  return std::exchange(static_cast<tcp::UnboundBuffer&>(buffer).*count, 0);
}

}  // namespace

GlooLoop::GlooLoop(std::shared_ptr<gloo::transport::tcp::Device> device)
    : device_(std::move(device)), wakeup_(MakeWakeup()) {
  device_->registerDescriptor(wakeup_, EPOLLIN, this);
}

// When this returns from the device, the loop has left handleEvents.
GlooLoop::~GlooLoop() {
  Sync();
  device_->unregisterDescriptor(wakeup_, this);
  close(wakeup_);
}

void GlooLoop::Post(std::function<void()> task) {
  bool asleep;
  {
    const absl::MutexLock lock(&mu_);
    asleep = waiting_.empty();
    waiting_.push_back(std::move(task));
    ++posted_count_;
  }
  // The descriptor stays readable until the loop has read it, so one write wakes it for all tasks.
  const uint64_t one = 1;
  if (asleep) [[maybe_unused]]
    const ssize_t written = write(wakeup_, &one, sizeof(one));
}

void GlooLoop::Sync() {
  const absl::MutexLock lock(&mu_);
  const uint64_t target = posted_count_;
  ++syncing_;
  while (ran_count_ < target) ran_.Wait(&mu_);
  --syncing_;
}

void GlooLoop::handleEvents(int) {
  uint64_t wakeups;
  [[maybe_unused]] const ssize_t got = read(wakeup_, &wakeups, sizeof(wakeups));
  {
    const absl::MutexLock lock(&mu_);
    running_.swap(waiting_);
  }
  for (const std::function<void()>& task : running_) task();
  const absl::MutexLock lock(&mu_);
  ran_count_ += running_.size();
  running_.clear();
  if (syncing_ > 0) ran_.SignalAll();
}

std::shared_ptr<gloo::Context> GlooContextOf(int rank, std::vector<Descriptor> connections,
                                             std::shared_ptr<tcp::Device> device, GlooLoop& loop,
                                             std::chrono::milliseconds timeout,
                                             const std::string& congestion, absl::Status& broken) {
  const int size = static_cast<int>(connections.size());
  auto transport = std::make_shared<TransportContext>(device, rank, size);
  transport->setTimeout(timeout);
  auto context = std::make_shared<Context>(rank, size, device, transport);
  context->setTimeout(timeout);
  loop.Post([&] {
    for (int peer = 0; peer < size; ++peer) {
      if (!connections[peer].valid()) continue;
      try {
        transport->Adopt(peer, std::move(connections[peer]), congestion);
      } catch (const std::exception& error) {
        broken.Update(absl::UnavailableError(
            absl::StrCat("rank ", peer, " is gone: its connection to rank ", rank,
                         " closed before the group was complete: ", error.what())));
      }
    }
  });
  loop.Sync();
  return context;
}

bool IsConnected(gloo::Context& context, int peer) { return context.getPair(peer) != nullptr; }

void Observe(gloo::Context& context, int peer, GlooPeer* observer) {
  PairWith(context, peer).Observe(observer);
}

// On the loop's thread: on any other thread, closing holds the connection's lock and waits for the
// loop, which may be waiting for that lock to start a send or receive.
void CloseConnections(gloo::Context& context, GlooLoop& loop) {
  loop.Post([&context] { context.closeConnections(); });
  loop.Sync();
  // In its next turn the loop has dropped the events that it had fetched before, and runs what
  // observers have posted.
  loop.Post([] {});
  loop.Sync();
}

size_t TakeReceived(gloo::transport::UnboundBuffer& buffer) {
  return Take(buffer, Counts::kReceived);
}

size_t TakeSent(gloo::transport::UnboundBuffer& buffer) { return Take(buffer, Counts::kSent); }

bool IsOnItsWay(gloo::Context& context, int peer) { return PairWith(context, peer).IsOnItsWay(); }

}  // namespace thinwire
