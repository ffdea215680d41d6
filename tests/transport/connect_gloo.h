// Ranks as threads of one process, connected by Gloo.
#ifndef THINWIRE_TESTS_TRANSPORT_CONNECT_GLOO_H_
#define THINWIRE_TESTS_TRANSPORT_CONNECT_GLOO_H_

#include <chrono>
#include <memory>
#include <vector>

#include "transport/planes.h"

namespace thinwire {

class GlooLinks;

// Connect `world` ranks; the results are by rank.
std::vector<Transport> ConnectGlooRanks(int world);
std::vector<std::unique_ptr<GlooLinks>> ConnectGlooLinks(int world,
                                                         std::chrono::milliseconds last_words);

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_CONNECT_GLOO_H_
