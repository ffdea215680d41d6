#include "schedule/engine/bucket.h"

#include <algorithm>

#include "schedule/collective/algorithm.h"
#include "schedule/hash.h"

namespace thinwire {
namespace {

std::vector<Segment> SegmentsOf(const BucketRequest& request) {
  if (!request.segments.empty()) return {request.segments.begin(), request.segments.end()};
  return {{.name = std::string(request.key),
           .offset = 0,
           .count = request.numel,
           .total = request.numel}};
}

// The algorithm of a bucket that is not cut; null for one that is.
const Algorithm* WholeAlgorithmOf(const BucketRequest& request, int world, const Options& options) {
  if (world == 1) return &Local();
  const size_t bytes = request.numel * SizeOf(request.dtype);
  const bool small = request.collective == Collective::kAllReduce && GoesRaw(bytes, world, options);
  return small ? &Raw() : nullptr;
}

Partition PartitionOf(const BucketRequest& request, std::span<const Segment> segments, int world,
                      const Options& options) {
  if (const Algorithm* const whole = WholeAlgorithmOf(request, world, options)) {
    return MakeWhole(*whole, segments, world);
  }
  switch (request.collective) {
    case Collective::kReduceScatter: return MakeReduceScatter(segments, world, options);
    case Collective::kAllGather: return MakeAllGather(segments, world, options);
    case Collective::kAllReduce: break;
  }
  return MakePartition(segments, world, options);
}

Route RouteOf(const Partition& partition, Matching matching) {
  const Algorithm* const algorithm = partition.chunks[0].algorithm;
  if (algorithm == &Local()) return Route::kLocal;
  return algorithm == &Raw() && matching == Matching::kByTag ? Route::kRaw : Route::kOrdered;
}

// The mean divides by this.
float DivisorOf(const BucketRequest& request, int world) {
  const bool mean = request.op == Op::kMean && request.collective != Collective::kAllGather;
  return mean ? static_cast<float>(world) : 1.0f;
}

bool UseFeedback(std::span<const Segment> segments, const Options& options) {
  return std::any_of(segments.begin(), segments.end(), [&](const Segment& segment) {
    return options.codecs[segment.codec].uses_feedback();
  });
}

}  // namespace

bool GoesRaw(size_t bytes, int world, const Options& options) {
  return bytes * (world - 1) <= options.min_bytes;
}

Bucket::Bucket(const BucketRequest& request, const Membership& members, Matching matching,
               const Options& options)
    : key_(request.key),
      collective_(request.collective),
      segments_(SegmentsOf(request)),
      whole_(request.segments.empty()),
      partition_(PartitionOf(request, segments_, members.size, options)),
      route_(RouteOf(partition_, matching)),
      scale_(1.0f / DivisorOf(request, members.size)),
      thresholds_(std::make_unique<uint32_t[]>(partition_.chunks.size())) {
  const bool momentum = options.momentum.beta != 0.0f;
  needs_memory_ = momentum || (partition_.keeps_residuals() && UseFeedback(segments_, options));
  layout_ = {.segments = partition_.segments,
             .owned = partition_.SecondHopOf(members.rank),
             .second_hop_weight = DivisorOf(request, members.size),
             .momentum = momentum};
  SetName(key_, &report_);
  report_.key = HashBytes(key_);
  report_.numel = request.numel;
  report_.partition_hash = partition_.Hash();
  report_.priority = request.priority;
  report_.dtype = static_cast<uint8_t>(request.dtype);
  report_.op = static_cast<uint8_t>(request.op);
  report_.collective = static_cast<uint8_t>(request.collective);
  report_.raw = route_ == Route::kRaw ? 1 : 0;
  report_.chunks = static_cast<uint32_t>(partition_.chunks.size());
}

bool Bucket::Matches(const BucketRequest& request) const {
  if (request.numel != report_.numel || static_cast<uint8_t>(request.dtype) != report_.dtype ||
      static_cast<uint8_t>(request.op) != report_.op || request.collective != collective_ ||
      request.priority != report_.priority || request.key != key_) {
    return false;
  }
  return whole_ ? request.segments.empty()
                : std::equal(segments_.begin(), segments_.end(), request.segments.begin(),
                             request.segments.end());
}

void Bucket::RangesOf(std::span<const uint32_t> segments, std::vector<Range>* ranges) const {
  ranges->clear();
  if (segments.empty() || route_ != Route::kOrdered) return;
  *ranges = thinwire::RangesOf(segments, segments_);
}

}  // namespace thinwire
