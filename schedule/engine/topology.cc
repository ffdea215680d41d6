#include "schedule/engine/topology.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "schedule/collective/grid.h"
#include "schedule/engine/link_probe.h"

namespace thinwire {
namespace {

bool MayGoByNodes(const Options& options) {
  return options.topology == Topology::kAuto || options.topology == Topology::kHierarchical;
}

std::string Megabytes(double bytes_per_s) {
  return absl::StrCat(static_cast<int64_t>(std::lround(bytes_per_s / 1e6)), " MB/s");
}

// Without nodes.
ChosenTopology Plain(const Options& options, int world, const std::string& reason) {
  const std::string way = DescribeWay(world, options);
  return {options, reason.empty() ? way : absl::StrCat(way, ", ", reason)};
}

}  // namespace

bool AsksForNodes(const Options& options, int world) {
  constexpr int kLeastWorld = 4;  // two nodes of two ranks
  return world >= kLeastWorld && options.local_size == 0 && MayGoByNodes(options);
}

absl::StatusOr<ChosenTopology> ChooseTopology(const Options& options, const Nodes& nodes,
                                              Transport& transport, Deadline deadline) {
  const int world = transport.members().size;
  if (!MayGoByNodes(options)) return Plain(options, world, "");
  if (!nodes.refusal.empty()) return Plain(options, world, nodes.refusal);
  Options by_nodes = options;
  by_nodes.topology = Topology::kHierarchical;
  by_nodes.local_size = nodes.local_size;
  const Grid grid = GridFor(world, by_nodes);
  const std::string way = DescribeWay(world, by_nodes);
  if (options.topology == Topology::kHierarchical) return ChosenTopology{by_nodes, way};
  if (transport.data->traits().memory != Memory::kHost) {
    return Plain(options, world, "since the links of a device's transport are not measured");
  }
  const absl::StatusOr<LinkRates> rates = ProbeLinks(grid, transport, deadline, options.timeout);
  if (!rates.ok()) return rates.status();
  const std::string measured =
      absl::StrCat("each rank sends ", Megabytes(rates->inside), " inside nodes of ", grid.columns,
                   " and ", Megabytes(rates->between), " between them");
  if (HierarchyPays(grid, options.codecs, *rates)) {
    return ChosenTopology{by_nodes, absl::StrCat(way, ", ", measured), *rates};
  }
  ChosenTopology plain = Plain(options, world, measured);
  plain.rates = *rates;
  return plain;
}

}  // namespace thinwire
