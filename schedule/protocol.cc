#include "schedule/protocol.h"

#include <algorithm>
#include <cstddef>

namespace thinwire {
namespace {

struct FrameHeader {
  FrameType type;
  uint32_t count;  // of entries; for kFail, bytes of the message
};
struct FailureHeader {
  int32_t code;
  uint32_t reserved;
};
constexpr size_t kRoom = kControlBytes - sizeof(FrameHeader);

template <typename Entry>
std::vector<ControlFrame> Pack(FrameType type, const std::vector<Entry>& entries) {
  constexpr size_t kPerFrame = kRoom / sizeof(Entry);
  std::vector<ControlFrame> frames;
  for (size_t i = 0; i < entries.size(); i += kPerFrame) {
    const size_t count = std::min(kPerFrame, entries.size() - i);
    const FrameHeader header{type, static_cast<uint32_t>(count)};
    ControlFrame& frame = frames.emplace_back();
    frame.fill(0);
    std::memcpy(frame.data(), &header, sizeof(header));
    std::memcpy(frame.data() + sizeof(header), &entries[i], count * sizeof(Entry));
  }
  return frames;
}

template <typename Entry>
bool Unpack(const ControlFrame& frame, uint32_t count, std::vector<Entry>* entries) {
  if (count > kRoom / sizeof(Entry)) return false;
  entries->resize(count);
  if (count > 0)
    std::memcpy(entries->data(), frame.data() + sizeof(FrameHeader), count * sizeof(Entry));
  return true;
}

bool UnpackReports(const ControlFrame& frame, uint32_t count, std::vector<Report>* reports) {
  if (!Unpack(frame, count, reports)) return false;
  for (Report& report : *reports) report.name[sizeof(report.name) - 1] = '\0';
  return true;
}

bool UnpackFailure(const ControlFrame& frame, uint32_t bytes, absl::Status* failure) {
  FailureHeader header;
  if (bytes > kRoom - sizeof(header)) return false;
  std::memcpy(&header, frame.data() + sizeof(FrameHeader), sizeof(header));
  const auto* text =
      reinterpret_cast<const char*>(frame.data()) + sizeof(FrameHeader) + sizeof(header);
  const bool known =
      header.code > 0 && header.code <= static_cast<int>(absl::StatusCode::kUnauthenticated);
  *failure =
      absl::Status(known ? static_cast<absl::StatusCode>(header.code) : absl::StatusCode::kInternal,
                   std::string(text, bytes));
  return true;
}

}  // namespace

size_t ChunkBytes(const Report& report) {
  return report.numel * sizeof(float) / std::max<uint32_t>(1, report.chunks);
}

void SetName(const std::string& name, Report* report) {
  const size_t bytes = std::min(name.size(), sizeof(report->name) - 1);
  std::memcpy(report->name, name.data(), bytes);
  report->name[bytes] = '\0';
}

std::vector<ControlFrame> PackReports(FrameType type, const std::vector<Report>& reports) {
  return Pack(type, reports);
}

std::vector<ControlFrame> PackAnnouncements(const std::vector<Announcement>& announcements) {
  return Pack(FrameType::kAnnounce, announcements);
}

std::vector<ControlFrame> PackPlan(const std::vector<PlannedChunk>& chunks) {
  return Pack(FrameType::kPlan, chunks);
}

ControlFrame PackFailure(const absl::Status& reason) {
  const std::string text(reason.message());
  const FailureHeader failure{static_cast<int32_t>(reason.code()), 0};
  const size_t bytes = std::min(text.size(), kRoom - sizeof(failure));
  const FrameHeader header{FrameType::kFail, static_cast<uint32_t>(bytes)};
  ControlFrame frame;
  frame.fill(0);
  std::memcpy(frame.data(), &header, sizeof(header));
  std::memcpy(frame.data() + sizeof(header), &failure, sizeof(failure));
  std::memcpy(frame.data() + sizeof(header) + sizeof(failure), text.data(), bytes);
  return frame;
}

ControlFrame PackSignal(FrameType type) {
  const FrameHeader header{type, 0};
  ControlFrame frame;
  frame.fill(0);
  std::memcpy(frame.data(), &header, sizeof(header));
  return frame;
}

std::optional<Parsed> ParseFrame(const ControlFrame& frame) {
  FrameHeader header;
  std::memcpy(&header, frame.data(), sizeof(header));
  Parsed parsed{header.type, {}, {}, {}, absl::OkStatus()};
  bool good = false;
  switch (header.type) {
    case FrameType::kReport:
    case FrameType::kOverdue: good = UnpackReports(frame, header.count, &parsed.reports); break;
    case FrameType::kAnnounce: good = Unpack(frame, header.count, &parsed.announcements); break;
    case FrameType::kFail: good = UnpackFailure(frame, header.count, &parsed.failure); break;
    case FrameType::kPlan: good = Unpack(frame, header.count, &parsed.planned); break;
    case FrameType::kBye:
    case FrameType::kPing:
    case FrameType::kPong: good = true; break;
  }
  if (!good) return std::nullopt;
  return parsed;
}

}  // namespace thinwire
