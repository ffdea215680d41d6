// Ranks that are threads of one process: the reference backend and the tests' workhorse. Its data
// plane matches by tag, blocks, and works on host memory.
#ifndef THINWIRE_TRANSPORT_IN_PROCESS_IN_PROCESS_H_
#define THINWIRE_TRANSPORT_IN_PROCESS_IN_PROCESS_H_

#include <vector>

#include "transport/planes.h"

namespace thinwire {

// One transport per rank. The ranks share what they need, and their transports may be destroyed in
// any order. Both planes of a rank share their failure; the end of a rank's control plane fails
// the others.
std::vector<Transport> MakeInProcessTransports(int size);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_IN_PROCESS_IN_PROCESS_H_
