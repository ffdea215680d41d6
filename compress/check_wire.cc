#include <algorithm>

#include "absl/strings/str_cat.h"
#include "compress/backend.h"
#include "compress/codec_list.h"
#include "compress/topk.h"
#include "compress/unaligned.h"

namespace thinwire {
namespace {

// Indices ascend within a sub-block, so no element has two entries.
bool Ascend(const uint8_t* entries, size_t count, size_t elements) {
  for (size_t i = 0; i < count; ++i) {
    const size_t index = EntryIndex(Get<uint32_t>(entries, i));
    if (index >= elements || (i > 0 && index <= EntryIndex(Get<uint32_t>(entries, i - 1))))
      return false;
  }
  return true;
}

absl::Status CheckEntries(const CodecSpec& spec, const uint8_t* wire, size_t numel) {
  const ShardLayout layout = LayoutOf(spec, numel);
  const size_t expected = EntryCount(spec, numel);
  size_t seen = 0;
  for (size_t b = 0; b < layout.blocks; ++b) {
    const size_t count = Get<uint32_t>(wire, b);
    const size_t elements = std::min(kSubBlock, numel - b * kSubBlock);
    if (count > expected - seen) {
      return absl::InvalidArgumentError(
          absl::StrCat("topk counts more than the ", expected, " entries of ", numel, " elements"));
    }
    if (!Ascend(wire + layout.codes_at + seen * sizeof(uint32_t), count, elements)) {
      return absl::InvalidArgumentError(absl::StrCat("the places of the topk entries of sub-block ",
                                                     b, " do not ascend below ", elements));
    }
    seen += count;
  }
  if (seen == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("topk counts add up to ", seen, ", expected ", expected));
}

}  // namespace

absl::Status CheckWire(const CodecSpec& spec, Bytes wire, size_t numel) {
  const size_t expected = EncodedBytes(spec, numel);
  if (wire.size() != expected) {
    return absl::InvalidArgumentError(absl::StrCat(numel, " elements of ", spec.ToString(),
                                                   ": expected ", expected, " bytes, got ",
                                                   wire.size()));
  }
  if (InfoOf(spec.id).kind != CodecKind::kEntries) return absl::OkStatus();
  return CheckEntries(spec, wire.data(), numel);
}

}  // namespace thinwire
