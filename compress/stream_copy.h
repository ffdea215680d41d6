// StreamCopy: a copy that will not be read soon, past the caches.
#ifndef THINWIRE_COMPRESS_STREAM_COPY_H_
#define THINWIRE_COMPRESS_STREAM_COPY_H_

#include <cstddef>

namespace thinwire {

// Host memory only. Stores that go past the caches read no line before they overwrite it, which
// spares a third of a copy's traffic, and evict nothing that the codecs need next.
void StreamCopy(float* to, const float* from, size_t count);

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_STREAM_COPY_H_
