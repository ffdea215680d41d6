#include "transport/gloo/gloo_pair.h"

#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/pair.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

namespace tcp = gloo::transport::tcp;

class GlooPair final : public tcp::Pair {
 public:
  // On the loop's thread. The base class has begun to listen when this runs, but nobody else than
  // that thread could take a connection from there: so none is taken before the socket is closed.
  GlooPair(tcp::Context* context, tcp::Device* device, int peer, std::chrono::milliseconds timeout,
           Descriptor connection)
      : tcp::Pair(context, device, peer, timeout), socket_(connection.fd()) {
    device_->unregisterDescriptor(fd_, this);
    ::close(fd_);
    fd_ = socket_;
    try {
      handleConnected();
      connection.Release();
    } catch (...) {
      fd_ = -1;  // else the base class closes it too, and ends the process if the loop has it not
      throw;
    }
  }

  // A connection that closes meanwhile may leave its descriptor to another one, and the answer is
  // that one's: nobody is the worse for it.
  bool IsOnItsWay() const {
    int unacknowledged = 0;
    return open_ && ioctl(socket_, SIOCOUTQ, &unacknowledged) == 0 && unacknowledged > 0;
  }

 private:
  void changeState(state next) noexcept override {
    if (next == CLOSED) open_ = false;
    tcp::Pair::changeState(next);
  }

  const int socket_;
  std::atomic<bool> open_{true};
};

class TransportContext final : public tcp::Context {
 public:
  using tcp::Context::Context;

  void Adopt(int peer, Descriptor connection) {
    pairs_[peer] =
        std::make_unique<GlooPair>(this, device_.get(), peer, getTimeout(), std::move(connection));
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

// Makes all pairs of a context.
class Adoption final : public GlooLoop::Task {
 public:
  Adoption(TransportContext& context, std::vector<Descriptor> connections)
      : context_(context), connections_(std::move(connections)) {}

  void Run() override {
    for (int peer = 0; peer < context_.size; ++peer) {
      if (peer == context_.rank) continue;
      try {
        context_.Adopt(peer, std::move(connections_[peer]));
      } catch (const std::exception& error) {
        status_ = absl::UnavailableError(
            absl::StrCat("rank ", peer, " is gone: its connection to rank ", context_.rank,
                         " closed before the group was complete: ", error.what()));
        return;
      }
    }
  }

  const absl::Status& status() const { return status_; }

 private:
  TransportContext& context_;
  std::vector<Descriptor> connections_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<gloo::Context>> GlooContextOf(int rank,
                                                             std::vector<Descriptor> connections,
                                                             std::shared_ptr<tcp::Device> device,
                                                             GlooLoop& loop,
                                                             std::chrono::milliseconds timeout) {
  const int size = static_cast<int>(connections.size());
  auto transport = std::make_shared<TransportContext>(device, rank, size);
  transport->setTimeout(timeout);
  auto context = std::make_shared<Context>(rank, size, device, transport);
  context->setTimeout(timeout);
  Adoption adoption(*transport, std::move(connections));
  loop.Post(&adoption);
  loop.Sync();
  if (!adoption.status().ok()) return adoption.status();
  return context;
}

bool IsOnItsWay(gloo::Context& context, int peer) {
  return static_cast<GlooPair&>(*context.getPair(peer)).IsOnItsWay();
}

}  // namespace thinwire
