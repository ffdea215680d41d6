// Ranks as threads of one process that are connected by Gloo.
#ifndef THINWIRE_TESTS_TRANSPORT_CONNECT_GLOO_H_
#define THINWIRE_TESTS_TRANSPORT_CONNECT_GLOO_H_

#include <memory>
#include <vector>

#include "transport/failure.h"
#include "transport/planes.h"

namespace thinwire {

class GlooLinks;

// By rank.
std::vector<Transport> ConnectGlooRanks(int world);
std::vector<std::shared_ptr<GlooLinks>> ConnectGlooLinks(
    int world, Failure::LostPeer lost_peer = Failure::LostPeer::kFailsAll);

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_CONNECT_GLOO_H_
