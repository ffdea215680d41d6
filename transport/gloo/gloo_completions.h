// How many of a buffer's transfers have ended, asked without waiting.
//
// Gloo counts them for threads that wait, and offers no other way to ask: a wait that finds nothing
// in time closes all connections. The counts are protected, and so open to a derived class.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_COMPLETIONS_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_COMPLETIONS_H_

#include <gloo/transport/unbound_buffer.h>

#include <cstddef>

namespace thinwire {

// Those that have ended since the last call. On the loop's thread, which counts them, and only for
// buffers that nobody waits on.
size_t TakeReceived(gloo::transport::UnboundBuffer& buffer);
size_t TakeSent(gloo::transport::UnboundBuffer& buffer);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_COMPLETIONS_H_
