#include "schedule/collective/hierarchy.h"

namespace thinwire {
namespace {

// Large enough that scales and padding count as they do in a chunk.
constexpr size_t kSample = size_t{1} << 20;

double BytesPerElement(const CodecSpec& spec) {
  return static_cast<double>(EncodedBytes(spec, kSample)) / kSample;
}

}  // namespace

LinkBytes FlatBytes(const Grid& nodes, const CodecPair& codec) {
  const double world = nodes.rows * nodes.columns;
  const double both = BytesPerElement(codec.up) + BytesPerElement(codec.down);
  return {.inside = both * (nodes.columns - 1) / world,
          .between = both * (world - nodes.columns) / world};
}

LinkBytes HierarchicalBytes(const Grid& nodes, const CodecPair& codec) {
  const double up = BytesPerElement(codec.up), down = BytesPerElement(codec.down);
  const double foreign_columns = (nodes.columns - 1.0) / nodes.columns;
  const double foreign_rows = (nodes.rows - 1.0) / nodes.rows;
  return {.inside = foreign_columns * (sizeof(float) + down),
          .between = foreign_rows / nodes.columns * (up + down)};
}

bool HierarchyPays(const Grid& nodes, std::span<const CodecPair> codecs, const LinkRates& rates) {
  bool pays = false;
  for (const CodecPair& codec : codecs) {
    if (codec.up.traits().entries()) continue;  // everybody's go to everybody in any case
    pays = true;
    const double seconds = HierarchicalBytes(nodes, codec).seconds(rates);
    if (FlatBytes(nodes, codec).seconds(rates) < kWorthIt * seconds) return false;
  }
  return pays;
}

}  // namespace thinwire
