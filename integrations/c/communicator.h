// The types behind the opaque handles of thinwire.h, and how options become an engine.
#ifndef THINWIRE_INTEGRATIONS_C_COMMUNICATOR_H_
#define THINWIRE_INTEGRATIONS_C_COMMUNICATOR_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "integrations/c/home_process.h"
#include "integrations/c/thinwire.h"
#include "schedule/engine/engine.h"

struct tw_comm {
  int rank = 0;
  int size = 1;
  bool on_device = false;
  std::string transport;  // what the data runs on, in words
  std::string topology;   // the way of dense allreduces, in words
  tw_nodes nodes = {};
  std::unique_ptr<thinwire::Engine> engine;
  thinwire::HomeProcess home;
};

struct tw_work {
  std::shared_ptr<thinwire::Work> work;
  thinwire::HomeProcess home;
};

namespace thinwire {

// Parses the options, compares them with the other ranks', connects. `options` is what ReadOptions
// made of the caller's.
absl::StatusOr<std::unique_ptr<tw_comm>> MakeCommunicator(const tw_options& options);

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_C_COMMUNICATOR_H_
