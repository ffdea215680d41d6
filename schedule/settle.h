// Settle: options as they are in a world of a certain size.
#ifndef THINWIRE_SCHEDULE_SETTLE_H_
#define THINWIRE_SCHEDULE_SETTLE_H_

#include "schedule/options.h"

namespace thinwire {

inline Options Settle(Options options, int size) {
  for (CodecPair& codec : options.codecs) codec = codec.ForWorld(size);
  return options;
}

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_SETTLE_H_
