// Sizes: exact functions of a spec and a number of elements, so that nobody sends a size.
#include "compress/codec_list.h"
#include "compress/topk.h"

namespace thinwire {
namespace {

size_t PadTo16(size_t bytes) { return (bytes + 15) / 16 * 16; }

}  // namespace

ShardLayout LayoutOf(const CodecSpec& spec, size_t numel) {
  const CodecInfo& info = InfoOf(spec.id);
  ShardLayout layout{};
  switch (info.kind) {
    case CodecKind::kElements: break;
    case CodecKind::kBlocks: layout.blocks = (numel + spec.block - 1) / spec.block; break;
    case CodecKind::kEntries: layout.blocks = (numel + kSubBlock - 1) / kSubBlock; break;
  }
  layout.codes_at = PadTo16(layout.head_bytes(info));
  const size_t codes = info.kind == CodecKind::kEntries ? EntryCount(spec, numel) : numel;
  layout.codes_bytes = (codes * info.code_bits + 7) / 8;
  layout.bytes = layout.codes_at + PadTo16(layout.codes_bytes);
  return layout;
}

size_t EncodedBytes(const CodecSpec& spec, size_t numel) { return LayoutOf(spec, numel).bytes; }

}  // namespace thinwire
