#include <vector>

#include "tests/fuzz/target.h"

namespace thinwire::fuzz {

std::span<const Target> Targets() {
  static const std::vector<Target> all = [] {
    std::vector<Target> targets;
    for (const auto* some : {&kCodecTargets, &kOrderTargets, &kMeshTargets, &kTransportTargets}) {
      targets.insert(targets.end(), some->begin(), some->end());
    }
    return targets;
  }();
  return all;
}

}  // namespace thinwire::fuzz
