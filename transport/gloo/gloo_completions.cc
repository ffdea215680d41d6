#include "transport/gloo/gloo_completions.h"

#include <gloo/transport/tcp/unbound_buffer.h>

#include <utility>

namespace thinwire {
namespace {

using gloo::transport::tcp::UnboundBuffer;

// Never an object: it only names what a derived class may see of any buffer.
struct Counts : UnboundBuffer {
  static constexpr int UnboundBuffer::*kReceived = &Counts::recvCompletions_;
  static constexpr int UnboundBuffer::*kSent = &Counts::sendCompletions_;
};

size_t Take(gloo::transport::UnboundBuffer& buffer, int UnboundBuffer::*count) {
  return std::exchange(static_cast<UnboundBuffer&>(buffer).*count, 0);
}

}  // namespace

size_t TakeReceived(gloo::transport::UnboundBuffer& buffer) {
  return Take(buffer, Counts::kReceived);
}

size_t TakeSent(gloo::transport::UnboundBuffer& buffer) { return Take(buffer, Counts::kSent); }

}  // namespace thinwire
