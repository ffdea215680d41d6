#include "integrations/nccl_shim/nccl_observer.h"

#include <iterator>

#include "absl/strings/str_format.h"
#include "compress/codec_spec.h"
#include "schedule/collective/settle.h"

namespace thinwire {
namespace {

struct SizeClass {
  size_t below;  // bytes
  const char* name;
};
constexpr SizeClass kClasses[] = {{size_t{1} << 16, "below 64 KiB"},
                                  {size_t{1} << 20, "64 KiB to 1 MiB"},
                                  {size_t{16} << 20, "1 to 16 MiB"},
                                  {SIZE_MAX, "16 MiB and more"}};

size_t ClassOf(size_t bytes) {
  size_t number = 0;
  while (number + 1 < std::size(kClasses) && bytes >= kClasses[number].below) ++number;
  return number;
}

const char* NameOf(NcclWay way) {
  switch (way) {
    case NcclWay::kCompressed: return "went compressed";
    case NcclWay::kCandidate: return "could go compressed";
    case NcclWay::kOther: return "of other elements or operations";
    case NcclWay::kSmall: return "smaller than THINWIRE_NCCL_MIN_BYTES";
    case NcclWay::kScattered: return "reduce-scatters, without THINWIRE_NCCL_REDUCE_SCATTER";
    case NcclWay::kAlone: return "among one rank";
    case NcclWay::kGrouped: return "in group calls";
    case NcclWay::kCaptured: return "in graph captures";
  }
  return "unknown";
}

// A node sends so much to others for a call: as NCCL's ring, which leaves a node once, or encoded.
double RingBytes(const NcclCall& call, int ranks) {
  const double bytes = static_cast<double>(call.bytes()) * (ranks - 1);
  return call.collective == Collective::kReduceScatter ? bytes : 2 * bytes / ranks;
}

// Allreduces go by nodes where there are several, reduce-scatters do not.
double CompressedBytes(const NcclCall& call, const char* codec, int ranks, int local) {
  const CodecPair pair = *CodecPair::Parse(codec);
  if (call.collective == Collective::kReduceScatter) {
    return static_cast<double>(EncodedBytes(pair.up, call.count)) * (ranks - local) * local;
  }
  const Grid nodes{ranks / local, local};
  const double an_element = local == 1 ? FlatBytes({ranks, 1}, pair).between
                                       : HierarchicalBytes(nodes, pair).between * local;
  return an_element * static_cast<double>(call.count);
}

}  // namespace

void NcclObserver::Count(const NcclCall& call, int ranks, NcclWay way) {
  const auto now = std::chrono::steady_clock::now();
  const absl::MutexLock lock(&mu_);
  if (ways_.empty()) first_ = now;
  last_ = now;
  ++ways_[way];
  if (way == NcclWay::kOther) return;
  Tally& tally = rows_[{*call.dtype(), ClassOf(call.bytes())}];
  ++tally.calls;
  tally.bytes += static_cast<double>(call.bytes());
  if (way != NcclWay::kCompressed && way != NcclWay::kCandidate) return;
  const int local = ranks > local_size_ && ranks % local_size_ == 0 ? local_size_ : 1;
  sent_.ring += RingBytes(call, ranks);
  sent_.int8 += CompressedBytes(call, "int8", ranks, local);
  sent_.int4 += CompressedBytes(call, "int4", ranks, local);
}

std::string NcclObserver::Report() const {
  const absl::MutexLock lock(&mu_);
  if (ways_.empty()) return "";
  const double seconds = std::chrono::duration<double>(last_ - first_).count();
  std::string text =
      absl::StrFormat("NCCL reductions in %.1f s, from the first to the last\n", seconds);
  for (const auto& [way, calls] : ways_) {
    absl::StrAppendFormat(&text, "%12d %s\n", calls, NameOf(way));
  }
  for (const auto& [row, tally] : rows_) {
    absl::StrAppendFormat(&text, "%12d of %s, %s: %.1f MB\n", tally.calls,
                          std::string(Name(row.first)), kClasses[row.second].name,
                          tally.bytes / 1e6);
  }
  if (sent_.ring == 0) return text + "nothing to gain: none of them can go compressed\n";
  absl::StrAppendFormat(
      &text,
      "a %s sends for those that can go compressed: %.1f MB by NCCL's ring, %.1f MB as int8 "
      "(%.2f x less), %.1f MB as int4 (%.2f x less)\n",
      local_size_ == 1 ? "rank" : absl::StrFormat("node of %d ranks", local_size_),
      sent_.ring / 1e6, sent_.int8 / 1e6, sent_.ring / sent_.int8, sent_.int4 / 1e6,
      sent_.ring / sent_.int4);
  constexpr double kBytesPerSecond = 1e10 / 8;
  absl::StrAppendFormat(
      &text, "on a link of 10 Gb/s these bytes take %.2f s, as int8 %.2f s, as int4 %.2f s\n",
      sent_.ring / kBytesPerSecond, sent_.int8 / kBytesPerSecond, sent_.int4 / kBytesPerSecond);
  return text;
}

}  // namespace thinwire
