#include "schedule/engine/checks.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "compress/codec_spec.h"

namespace thinwire {
namespace {

std::string Where(int rank, std::string_view key) {
  return absl::StrCat("rank ", rank, ", tensor '", std::string(key), "': ");
}

absl::Status CheckMomentum(const BucketRequest& request, const std::string& where) {
  if (request.key.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, "momentum is kept by name, and this call has none; give it a name"));
  }
  if (request.collective != Collective::kAllReduce) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, "momentum goes with an allreduce, got another collective; ",
                     "keep the momentum in the optimizer"));
  }
  if (request.op == Op::kMean) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(where, "momentum goes with the mean, got the sum; a sum of every rank's ",
                   "momentum would count it once a rank"));
}

// All collectives but the allreduce cut the bucket by ranks, so it has a single codec.
absl::Status CheckScattered(const BucketRequest& request, const Membership& members,
                            const Options& options, const std::string& where) {
  const bool divides = request.collective != Collective::kAllGather;
  if (divides && request.numel % members.size != 0) {
    const bool sums = request.collective == Collective::kReduceScatter;
    return absl::InvalidArgumentError(
        absl::StrCat(where, sums ? "a reduce-scatter" : "an all-to-all", " of ", request.numel,
                     " elements over ", members.size,
                     " ranks; expected a multiple of the ranks; pad the tensor"));
  }
  const uint32_t codec = request.segments.empty() ? 0 : request.segments.front().codec;
  for (const Segment& segment : request.segments) {
    if (segment.codec == codec) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(where, "its segments have several codecs, expected one in a reduce-scatter, ",
                     "all-gather or all-to-all; make a bucket for each"));
  }
  if (!options.codecs[codec].up.traits().entries()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      where, options.codecs[codec].ToString(), " has no reduce-scatter, all-gather or all-to-all, ",
      "since its entries go to every rank; take a dense codec such as int4"));
}

absl::Status CheckSegments(const BucketRequest& request, const Options& options,
                           const std::string& where) {
  size_t covered = request.segments.empty() ? request.numel : 0;
  for (const Segment& segment : request.segments) {
    if (segment.count > segment.total || segment.offset > segment.total - segment.count) {
      return absl::InvalidArgumentError(absl::StrCat(where, "segment '", segment.name, "' has ",
                                                     segment.count, " elements from element ",
                                                     segment.offset, " of ", segment.total));
    }
    covered += segment.count;
    if (segment.codec >= options.codecs.size()) {
      return absl::InvalidArgumentError(absl::StrCat(where, "segment '", segment.name,
                                                     "' wants codec ", segment.codec, ", expected ",
                                                     "0 to ", options.codecs.size() - 1));
    }
  }
  if (covered == request.numel) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(where, "its segments have ", covered,
                                                 " elements together, expected ", request.numel));
}

}  // namespace

absl::Status CheckKernels(const Options& options, const Device& device) {
  for (const CodecPair& codec : options.codecs) {
    if (codec.has_kernels()) continue;
    return absl::UnimplementedError(absl::StrCat(
        codec.ToString(), " has no kernels for ", device.name(), "; take another codec there, ",
        "such as int4 with rounding=nearest, or reduce such tensors on the CPU"));
  }
  return absl::OkStatus();
}

absl::Status CheckBucket(const BucketRequest& request, const Membership& members,
                         const Options& options) {
  const std::string where = Where(members.rank, request.key);
  if (request.numel == 0) {
    return absl::InvalidArgumentError(absl::StrCat(where, "a bucket has at least one element"));
  }
  size_t most = request.numel;
  for (const Segment& segment : request.segments) most = std::max(most, segment.total);
  if (absl::Status bad = CheckElements(most); !bad.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(where, std::string(bad.message())));
  }
  if (options.momentum.beta != 0.0f) {
    if (absl::Status bad = CheckMomentum(request, where); !bad.ok()) return bad;
  }
  if (absl::Status bad = CheckSegments(request, options, where); !bad.ok()) return bad;
  if (request.collective == Collective::kAllReduce) return absl::OkStatus();
  return CheckScattered(request, members, options, where);
}

}  // namespace thinwire
