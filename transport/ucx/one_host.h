// Which ranks can share memory.
#ifndef THINWIRE_TRANSPORT_UCX_ONE_HOST_H_
#define THINWIRE_TRANSPORT_UCX_ONE_HOST_H_

#include <string>

namespace thinwire {

// Text that is equal in two processes only if one can map the other's memory: the kernel's run, the
// namespaces, the user, and the folder of shared memory. Containers on one host differ, as a rule.
std::string HostIdentity();

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_UCX_ONE_HOST_H_
