// Which of the kernel's congestion controls a connection runs: the system's default, unless the
// user names one. docs/decisions.md, 35 says why it is not chosen automatically.
#ifndef THINWIRE_TRANSPORT_MESH_CONGESTION_H_
#define THINWIRE_TRANSPORT_MESH_CONGESTION_H_

#include <string>

#include "absl/status/status.h"

namespace thinwire {

// `congestion` is a name of the kernel's, such as "cubic"; "system" or empty: the kernel's default.

// InvalidArgument, which lists what this process may choose, if it may not choose `congestion`.
absl::Status CheckCongestion(const std::string& congestion);

// Sets the control of a TCP socket. The name has been checked.
void ChooseCongestion(int socket, const std::string& congestion);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_CONGESTION_H_
