// Ranks that are threads of one process: the reference backend, which most tests use. Its data
// plane matches by tag, blocks, and uses host memory.
#ifndef THINWIRE_TRANSPORT_IN_PROCESS_IN_PROCESS_H_
#define THINWIRE_TRANSPORT_IN_PROCESS_IN_PROCESS_H_

#include <vector>

#include "transport/planes.h"

namespace thinwire {

// Returns one transport per rank. The transports share ownership of their common state and may be
// destroyed in any order. Both planes of a rank share their failure; destroying a rank's control
// plane fails the other ranks.
std::vector<Transport> MakeInProcessTransports(int size);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_IN_PROCESS_IN_PROCESS_H_
