#include "schedule/collective/direct.h"

#include <algorithm>

namespace thinwire {
namespace {

bool HaveOneCodec(std::span<const Segment> segments) {
  return std::all_of(segments.begin(), segments.end(), [&](const Segment& segment) {
    return segment.codec == segments.front().codec;
  });
}

// Chunks by priority: what goes outside their order delays more urgent ones by its bytes.
size_t MostBytes(const Options& options) {
  return options.policy == Policy::kP3 ? options.min_bytes : options.one_hop_bytes;
}

}  // namespace

bool GoesRaw(size_t bytes, int world, const Options& options) {
  return bytes * (world - 1) <= options.min_bytes;
}

DirectExchange DirectExchangeOf(std::span<const Segment> segments, DType dtype, int world,
                                const Options& options) {
  size_t numel = 0;
  for (const Segment& segment : segments) numel += segment.count;
  const size_t raw = numel * SizeOf(dtype);
  if (GoesRaw(raw, world, options)) return {&Raw(), raw * (world - 1)};
  const bool in_order = options.min_bytes == 0 || numel * sizeof(float) > options.chunk_bytes;
  if (in_order || !HaveOneCodec(segments)) return {};
  const CodecSpec& codec = options.codecs[segments.front().codec].up;
  const size_t bytes = EncodedBytes(codec, numel) * (world - 1);
  if (bytes > MostBytes(options)) return {};
  if (codec.traits().entries()) return {&Entries(), bytes};
  // Two hops would send that much less, which on a slow link is worth more than a latency.
  const size_t more = bytes * (world - 2) / world;
  return more <= options.min_bytes ? DirectExchange{&OneHop(), bytes} : DirectExchange{};
}

}  // namespace thinwire
