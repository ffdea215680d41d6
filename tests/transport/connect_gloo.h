// Ranks as threads of one process that are connected by Gloo.
#ifndef THINWIRE_TESTS_TRANSPORT_CONNECT_GLOO_H_
#define THINWIRE_TESTS_TRANSPORT_CONNECT_GLOO_H_

#include <vector>

#include "transport/transport.h"

namespace thinwire {

struct GlooMesh;

// By rank.
std::vector<Transport> ConnectGlooRanks(int world);
std::vector<GlooMesh> ConnectGlooMeshes(int world);

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_CONNECT_GLOO_H_
