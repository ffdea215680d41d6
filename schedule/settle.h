// Settle: options as they are in a world of a certain size.
#ifndef THINWIRE_SCHEDULE_SETTLE_H_
#define THINWIRE_SCHEDULE_SETTLE_H_

#include "schedule/collective/chunk_size.h"
#include "schedule/options.h"

namespace thinwire {

inline Options Settle(Options options, int size) {
  for (CodecPair& codec : options.codecs) codec = codec.ForWorld(size);
  options.chunk_bytes = ChunkBytesOf(options, size);
  return options;
}

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_SETTLE_H_
