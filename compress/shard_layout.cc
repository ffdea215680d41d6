// Sizes are exact functions of a spec and a number of elements, so that nobody sends a size.
#include "compress/shard_layout.h"

#include <cstring>

#include "compress/codecs/adaptive.h"

namespace thinwire {
namespace {

size_t PadTo16(size_t bytes) { return (bytes + 15) / 16 * 16; }

size_t Quotient(size_t numel, size_t unit) { return (numel + unit - 1) / unit; }

}  // namespace

ShardLayout LayoutOf(const CodecSpec& spec, size_t numel) {
  const CodecTraits& traits = spec.traits();
  ShardLayout layout{};
  size_t code_bits = numel * traits.code_bits;
  switch (traits.kind) {
    case CodecKind::kElements: break;
    case CodecKind::kBlocks:
      layout.blocks = Quotient(numel, spec.block);
      layout.head_bytes = layout.blocks * sizeof(uint16_t);
      break;
    case CodecKind::kEntries:
      layout.blocks = Quotient(numel, kSubBlock);
      layout.head_bytes = layout.blocks * sizeof(uint32_t);
      code_bits = EntryCount(spec.density_ppm, numel) * traits.code_bits;
      break;
    case CodecKind::kWidths:
      layout.blocks = Quotient(numel, kTransform);
      layout.head_bytes = layout.blocks * sizeof(uint16_t);
      code_bits = AdaptivePlanes(spec.sixteenths, layout.blocks) * kTransform;
      break;
  }
  layout.codes_at = PadTo16(layout.head_bytes);
  layout.codes_bytes = (code_bits + 7) / 8;
  layout.bytes = layout.codes_at + PadTo16(layout.codes_bytes);
  return layout;
}

void ZeroPadding(const ShardLayout& layout, uint8_t* wire) {
  std::memset(wire + layout.head_bytes, 0, layout.codes_at - layout.head_bytes);
  const size_t end = layout.codes_at + layout.codes_bytes;
  std::memset(wire + end, 0, layout.bytes - end);
}

size_t EncodedBytes(const CodecSpec& spec, size_t numel) { return LayoutOf(spec, numel).bytes; }

}  // namespace thinwire
