// The data planes that must keep the contract, for data_plane_test.cc.
#ifndef THINWIRE_TESTS_TRANSPORT_PLANE_KINDS_H_
#define THINWIRE_TESTS_TRANSPORT_PLANE_KINDS_H_

#include <functional>
#include <memory>
#include <vector>

#include "transport/planes.h"

namespace thinwire {

using Planes = std::vector<std::unique_ptr<DataPlane>>;

struct PlaneKind {
  const char* name;
  std::function<Planes(int)> make;  // makes the planes of a world, by rank
  DataTraits traits;
  bool receives_ahead = false;  // Expect returns exchanges
  bool needs_ucx = false;
};

std::vector<PlaneKind> PlaneKinds();

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_PLANE_KINDS_H_
