#include "schedule/engine/checks.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "compress/codec_spec.h"

namespace thinwire {
namespace {

std::string Where(int rank, std::string_view key) {
  return absl::StrCat("rank ", rank, ", tensor '", std::string(key), "': ");
}

// A kernel can't be asked to read what is not its device's, or not aligned to an element.
absl::Status CheckMemory(const TensorView& view, const Device& device) {
  if (!device.Holds(view.data)) {
    return absl::InvalidArgumentError(absl::StrCat("its memory is not of ", device.name(),
                                                   ", expected a tensor on that device; move it"));
  }
  if (reinterpret_cast<uintptr_t>(view.data) % SizeOf(view.dtype) == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("its address is no multiple of the ",
                                                 SizeOf(view.dtype), " bytes of an element; ",
                                                 "align it, or copy it"));
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

// All but the allreduce cut the bucket by ranks, so its codec is one.
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

size_t OutputNumel(Collective collective, size_t numel, int size) {
  switch (collective) {
    case Collective::kReduceScatter: return numel / size;
    case Collective::kAllGather: return numel * size;
    case Collective::kAllToAll:
    case Collective::kAllReduce: break;
  }
  return numel;
}

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

absl::Status CheckSubmission(const Submission& submission, const Bucket& bucket,
                             const Membership& members, const Device* device) {
  const TensorView &in = submission.input, &out = submission.output;
  const Report& described = bucket.report();
  const size_t expected = OutputNumel(bucket.collective(), in.numel, members.size);
  const auto bad = [&](auto... parts) {
    return absl::InvalidArgumentError(absl::StrCat(Where(members.rank, bucket.key()), parts...));
  };
  if (in.numel != described.numel || static_cast<uint8_t>(in.dtype) != described.dtype) {
    return bad("the input has ", in.numel, " elements of ", std::string(Name(in.dtype)),
               ", expected ", described.numel, " of ",
               std::string(Name(static_cast<DType>(described.dtype))),
               " as its bucket was registered with");
  }
  if (out.numel != expected || in.dtype != out.dtype) {
    return bad("the output has ", out.numel, " elements of ", std::string(Name(out.dtype)),
               ", expected ", expected, " of ", std::string(Name(in.dtype)), " as the input has");
  }
  if (bucket.collective() == Collective::kAllToAll && in.data == out.data && in.numel > 0) {
    return bad("an all-to-all got one buffer as input and output, expected two");
  }
  if (in.numel > 0 && (in.data == nullptr || out.data == nullptr)) {
    return bad("got a null pointer for ", in.numel, " elements");
  }
  for (const TensorView* view : {&in, &out}) {
    if (device == nullptr || in.numel == 0) break;
    if (absl::Status status = CheckMemory(*view, *device); !status.ok()) {
      return bad(std::string(status.message()));
    }
  }
  if (submission.divisor != 0.0f) {
    if (!std::isnormal(submission.divisor) || submission.divisor < 0.0f) {
      return bad("the divisor is ", submission.divisor, ", expected a finite number above 0, or 0 ",
                 "for the number of ranks");
    }
    if (described.op != static_cast<uint8_t>(Op::kMean) || !Reduces(bucket.collective())) {
      return bad("a divisor goes with the mean, got a sum, an all-gather or an all-to-all");
    }
    if (!bucket.layout().arrays.empty()) {
      return bad("a divisor of ", submission.divisor, " goes with a group without momentum, whose ",
                 "own part is a mean over all ranks; keep the momentum in the optimizer");
    }
  }
  if (submission.absent.empty()) return absl::OkStatus();
  if (bucket.collective() != Collective::kAllReduce) {
    return bad("absent segments go with an allreduce, got another collective");
  }
  for (const uint32_t number : submission.absent) {
    if (number < bucket.segments()) continue;
    return bad("segment ", number, " is absent, expected 0 to ", bucket.segments() - 1);
  }
  return absl::OkStatus();
}

absl::Status CheckNotCaptured(DeviceStream& stream, const std::string& what) {
  if (!stream.IsCapturing()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      what, ": its stream is being captured into a CUDA graph, expected one that runs; ",
      "a graph can't hold an exchange with other ranks: end the capture before the "
      "allreduce, and capture the rest"));
}

}  // namespace thinwire
