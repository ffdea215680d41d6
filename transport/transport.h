// Transport: the planes of one rank in one group, as a backend gives them.
#ifndef THINWIRE_TRANSPORT_TRANSPORT_H_
#define THINWIRE_TRANSPORT_TRANSPORT_H_

#include <memory>
#include <utility>

#include "transport/membership.h"
#include "transport/planes.h"

namespace thinwire {

// How planes put blocks into messages. Ranks of different versions would never meet, so they are
// told apart before they connect. 2: small blocks travel in parcels (gloo/gloo_links.h).
inline constexpr int kFramingVersion = 2;

// A movable value. The data plane is destroyed first: destroying the control plane is leaving the
// group, and the data plane of the same backend needs its connections until then. Destroying or
// replacing the data plane alone leaves the control plane as it is.
//
// Planes of one backend may share their failure: those of Gloo and in_process do, so aborting
// either fails both. Planes of different backends do not, and whoever combines them passes a
// failure on.
struct Transport {
  std::unique_ptr<ControlPlane> control;
  std::unique_ptr<DataPlane> data;

  Transport() = default;
  Transport(std::unique_ptr<ControlPlane> control, std::unique_ptr<DataPlane> data)
      : control(std::move(control)), data(std::move(data)) {}
  ~Transport() { Reset(); }

  Transport(Transport&&) = default;
  Transport& operator=(Transport&& other) {
    if (this == &other) return *this;
    Reset();
    control = std::move(other.control);
    data = std::move(other.data);
    return *this;
  }

  // Both planes are there, or the value is empty: a world of one needs no transport.
  bool empty() const { return control == nullptr; }
  const Membership& members() const { return control->members(); }

  // Leaves the group; the value is empty afterwards.
  void Reset() {
    data.reset();
    control.reset();
  }
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_TRANSPORT_H_
