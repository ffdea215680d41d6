// Sizes are exact functions of a spec and a number of elements, so that nobody sends a size.
#include "compress/shard_layout.h"

namespace thinwire {
namespace {

size_t PadTo16(size_t bytes) { return (bytes + 15) / 16 * 16; }

size_t Quotient(size_t numel, size_t unit) { return (numel + unit - 1) / unit; }

}  // namespace

ShardLayout LayoutOf(const CodecSpec& spec, size_t numel) {
  const CodecTraits& traits = spec.traits();
  ShardLayout layout{};
  size_t codes = numel;
  switch (traits.kind) {
    case CodecKind::kElements: break;
    case CodecKind::kBlocks:
      layout.blocks = Quotient(numel, spec.block);
      layout.head_bytes = layout.blocks * sizeof(uint16_t);
      break;
    case CodecKind::kEntries:
      layout.blocks = Quotient(numel, kSubBlock);
      layout.head_bytes = layout.blocks * sizeof(uint32_t);
      codes = EntryCount(spec.density_ppm, numel);
      break;
  }
  layout.codes_at = PadTo16(layout.head_bytes);
  layout.codes_bytes = (codes * traits.code_bits + 7) / 8;
  layout.bytes = layout.codes_at + PadTo16(layout.codes_bytes);
  return layout;
}

size_t EncodedBytes(const CodecSpec& spec, size_t numel) { return LayoutOf(spec, numel).bytes; }

}  // namespace thinwire
