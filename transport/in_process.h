// Ranks that are threads of one process: the reference transport and the tests' workhorse.
#ifndef THINWIRE_TRANSPORT_IN_PROCESS_H_
#define THINWIRE_TRANSPORT_IN_PROCESS_H_

#include <memory>
#include <vector>

#include "transport/transport.h"

namespace thinwire {

// One transport per rank; they share what they need and may be destroyed in any order. Destroying
// one is losing that peer: the others' calls fail with Unavailable naming its rank.
std::vector<std::unique_ptr<Transport>> MakeInProcessTransports(int size);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_IN_PROCESS_H_
