#ifndef THINWIRE_TRANSPORT_CHOSEN_PLANE_H_
#define THINWIRE_TRANSPORT_CHOSEN_PLANE_H_

#include <memory>
#include <string>

#include "transport/data_plane.h"

namespace thinwire {

// A data plane that all ranks of a group have agreed on.
struct ChosenPlane {
  std::unique_ptr<DataPlane> data;
  std::string words;  // what it runs on, such as "ucx 1.13.1 over shared memory"
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_CHOSEN_PLANE_H_
