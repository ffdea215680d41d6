#include "integrations/nccl_shim/nccl_observer.h"

#include <iterator>

#include "absl/strings/str_format.h"
#include "compress/codec_spec.h"

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
    case NcclWay::kAlone: return "among one rank";
    case NcclWay::kGrouped: return "in group calls";
    case NcclWay::kCaptured: return "in graph captures";
  }
  return "unknown";
}

CodecSpec SpecOf(const char* name) { return *CodecSpec::Parse(name); }

// The bytes that a rank sends, for both hops.
double SentBytes(double encoded, int ranks) { return 2 * encoded * (ranks - 1) / ranks; }

}  // namespace

void NcclObserver::Count(const NcclCall& call, int ranks, NcclWay way) {
  static const CodecSpec int8 = SpecOf("int8"), int4 = SpecOf("int4");
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
  sent_.ring += SentBytes(static_cast<double>(call.bytes()), ranks);
  sent_.int8 += SentBytes(static_cast<double>(EncodedBytes(int8, call.count)), ranks);
  sent_.int4 += SentBytes(static_cast<double>(EncodedBytes(int4, call.count)), ranks);
}

std::string NcclObserver::Report() const {
  const absl::MutexLock lock(&mu_);
  if (ways_.empty()) return "";
  const double seconds = std::chrono::duration<double>(last_ - first_).count();
  std::string text =
      absl::StrFormat("NCCL allreduces in %.1f s, from the first to the last\n", seconds);
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
      "a rank sends for those that can go compressed: %.1f MB by NCCL's ring, %.1f MB as int8 "
      "(%.2f x less), %.1f MB as int4 (%.2f x less)\n",
      sent_.ring / 1e6, sent_.int8 / 1e6, sent_.ring / sent_.int8, sent_.int4 / 1e6,
      sent_.ring / sent_.int4);
  constexpr double kBytesPerSecond = 1e10 / 8;
  absl::StrAppendFormat(
      &text, "on a link of 10 Gb/s these bytes take %.2f s, as int8 %.2f s, as int4 %.2f s\n",
      sent_.ring / kBytesPerSecond, sent_.int8 / kBytesPerSecond, sent_.int4 / kBytesPerSecond);
  return text;
}

}  // namespace thinwire
