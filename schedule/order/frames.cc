#include "schedule/order/frames.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>

#include "absl/strings/str_cat.h"
#include "compress/types.h"

namespace thinwire {
namespace {

struct FrameHeader {
  FrameType type;
  uint32_t count;  // of entries; for kFail, bytes of the message
};
struct FailureHeader {
  int32_t code;
  uint32_t silent;  // ranks that will not echo it
};
constexpr uint32_t kMostSilent = 1 << 20;  // bounds the number that a peer sends
constexpr size_t kRoom = kControlBytes - sizeof(FrameHeader);

ControlFrame FrameOf(FrameType type, size_t count) {
  const FrameHeader header{type, static_cast<uint32_t>(count)};
  ControlFrame frame;
  frame.fill(0);
  std::memcpy(frame.data(), &header, sizeof(header));
  return frame;
}

template <typename Entry>
ControlFrame Pack(FrameType type, std::span<const Entry> entries) {
  ControlFrame frame = FrameOf(type, entries.size());
  if (!entries.empty()) {
    std::memcpy(frame.data() + sizeof(FrameHeader), entries.data(), entries.size_bytes());
  }
  return frame;
}

// The entries from `first` on that one frame has room for.
template <typename Entry>
std::span<const Entry> Part(const std::vector<Entry>& entries, size_t first) {
  const size_t count = std::min(kRoom / sizeof(Entry), entries.size() - first);
  return std::span(entries).subspan(first, count);
}

template <typename Entry>
bool Unpack(const ControlFrame& frame, uint32_t count, std::vector<Entry>* entries) {
  if (count > kRoom / sizeof(Entry)) return false;
  entries->resize(count);
  if (count > 0) {
    std::memcpy(entries->data(), frame.data() + sizeof(FrameHeader), count * sizeof(Entry));
  }
  return true;
}

bool UnpackReport(const ControlFrame& frame, uint32_t count, Report* report) {
  if (count != 1) return false;
  std::memcpy(report, frame.data() + sizeof(FrameHeader), sizeof(*report));
  report->name[sizeof(report->name) - 1] = '\0';
  return true;
}

bool UnpackFailure(const ControlFrame& frame, uint32_t bytes, ParsedFrame* parsed) {
  FailureHeader header;
  if (bytes > kRoom - sizeof(header)) return false;
  std::memcpy(&header, frame.data() + sizeof(FrameHeader), sizeof(header));
  const auto* text =
      reinterpret_cast<const char*>(frame.data()) + sizeof(FrameHeader) + sizeof(header);
  const bool known =
      header.code > 0 && header.code <= static_cast<int>(absl::StatusCode::kUnauthenticated);
  parsed->failure =
      absl::Status(known ? static_cast<absl::StatusCode>(header.code) : absl::StatusCode::kInternal,
                   std::string(text, bytes));
  parsed->silent = static_cast<int>(std::min<uint32_t>(header.silent, kMostSilent));
  return true;
}

// A goodbye of an older release has no number, which counts as all collectives.
bool UnpackBye(const ControlFrame& frame, uint32_t count, uint64_t* started) {
  *started = std::numeric_limits<uint64_t>::max();
  if (count == 1) std::memcpy(started, frame.data() + sizeof(FrameHeader), sizeof(*started));
  return count <= 1;
}

}  // namespace

size_t ChunkBytes(const Report& report) {
  return report.numel * sizeof(float) / std::max<uint32_t>(1, report.chunks);
}

void SetName(std::string_view name, std::string_view shape, Report* report) {
  constexpr size_t kRoomForShape = 24;  // bytes that a long name leaves for it
  std::span<char> room = report->name;
  std::ranges::fill(room, '\0');
  const size_t left = shape.empty() ? 0 : std::min(shape.size() + 1, kRoomForShape);
  room = room.subspan(name.copy(room.data(), room.size() - 1 - left) + 1);
  if (!room.empty()) shape.copy(room.data(), room.size() - 1);
}

std::string_view ShapeOf(const Report& report) {
  const std::string_view text(report.name, sizeof(report.name));
  const std::string_view rest = text.substr(text.find('\0') + 1);
  return rest.substr(0, rest.find('\0'));
}

size_t EntriesPerFrame(const OrderMessage& message) {
  if (message.type == FrameType::kAnnounce) return kRoom / sizeof(Announcement);
  if (message.type == FrameType::kPredict) return kRoom / sizeof(PredictedChunk);
  if (message.type == FrameType::kWithdraw) return kRoom / sizeof(Withdrawal);
  return 1;
}

ControlFrame PackPart(const OrderMessage& message, size_t first) {
  switch (message.type) {
    case FrameType::kReport:
    case FrameType::kGroupReport:
    case FrameType::kOverdue: return Pack(message.type, std::span(&message.report, 1));
    case FrameType::kAnnounce: return Pack(message.type, Part(message.announcements, first));
    case FrameType::kPredict: return Pack(message.type, Part(message.predicted, first));
    case FrameType::kWithdraw: return Pack(message.type, Part(message.withdrawn, first));
    default: return PackSignal(message.type);
  }
}

ControlFrame PackFailure(const absl::Status& reason, int silent) {
  const std::string_view text(reason.message().data(), reason.message().size());
  const FailureHeader failure{static_cast<int32_t>(reason.code()), static_cast<uint32_t>(silent)};
  const size_t bytes = std::min(text.size(), kRoom - sizeof(failure));
  ControlFrame frame = FrameOf(FrameType::kFail, bytes);
  uint8_t* const body = frame.data() + sizeof(FrameHeader);
  std::memcpy(body, &failure, sizeof(failure));
  std::memcpy(body + sizeof(failure), text.data(), bytes);
  return frame;
}

ControlFrame PackBye(uint64_t started) {
  return Pack(FrameType::kBye, std::span<const uint64_t>(&started, 1));
}

ControlFrame PackSignal(FrameType type) { return FrameOf(type, 0); }

std::optional<ParsedFrame> ParseFrame(const ControlFrame& frame) {
  FrameHeader header;
  std::memcpy(&header, frame.data(), sizeof(header));
  ParsedFrame parsed;
  OrderMessage& message = parsed.message;
  message.type = header.type;
  bool good = false;
  switch (header.type) {
    case FrameType::kReport:
    case FrameType::kGroupReport:
    case FrameType::kOverdue: good = UnpackReport(frame, header.count, &message.report); break;
    case FrameType::kAnnounce: good = Unpack(frame, header.count, &message.announcements); break;
    case FrameType::kPredict: good = Unpack(frame, header.count, &message.predicted); break;
    case FrameType::kWithdraw: good = Unpack(frame, header.count, &message.withdrawn); break;
    case FrameType::kFail: good = UnpackFailure(frame, header.count, &parsed); break;
    case FrameType::kBye: good = UnpackBye(frame, header.count, &parsed.started); break;
    case FrameType::kPing:
    case FrameType::kPong:
    case FrameType::kByeHeard: good = true; break;
  }
  if (!good) return std::nullopt;
  return parsed;
}

namespace {

bool Agree(const Report& a, const Report& b) {
  return a.numel == b.numel && a.partition_hash == b.partition_hash && a.dtype == b.dtype &&
         a.op == b.op && a.direct == b.direct && a.collective == b.collective &&
         a.chunks == b.chunks;
}

}  // namespace

std::string DescribeReport(const Report& report) {
  constexpr const char* kOps[] = {"mean", "sum", "mean by a divisor of the call"};
  constexpr const char* kCollectives[] = {"", ", reduce-scatter", ", all-gather", ", all-to-all"};
  const std::string shape(ShapeOf(report));
  return absl::StrCat(
      report.numel, " elements of ", std::string(Name(static_cast<DType>(report.dtype))),
      shape.empty() ? "" : " in the shape ", shape, ", ", kOps[std::min<size_t>(report.op, 2)],
      report.collective < 4 ? kCollectives[report.collective] : ", unknown",
      report.direct ? ", in one exchange" : "");
}

absl::Status CheckAgreement(int first_rank, const Report& first, int rank, const Report& report) {
  if (Agree(first, report)) return absl::OkStatus();
  const std::string one = DescribeReport(first), other = DescribeReport(report);
  return absl::FailedPreconditionError(absl::StrCat(
      "tensor '", report.name, "': rank ", first_rank, " has ", one, ", but rank ", rank, " has ",
      other,
      one != other                   ? ""
      : first.op == kDividedByCaller ? " by another divisor, of another shape or in other segments"
                                     : " of another shape or in other segments",
      "; call with the same tensors in the same order on every rank"));
}

}  // namespace thinwire
