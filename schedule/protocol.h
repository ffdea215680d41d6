// What ranks say on the control channel. Wire structs are fixed in width and copied into control
// frames as they stand (little-endian hosts); compress/FORMAT.md's version covers them.
#ifndef THINWIRE_SCHEDULE_PROTOCOL_H_
#define THINWIRE_SCHEDULE_PROTOCOL_H_

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "schedule/hash.h"
#include "transport/transport.h"

namespace thinwire {

enum class FrameType : uint32_t {
  kReport = 1,    // rank -> leader: "these tensors are ready here"
  kAnnounce = 2,  // leader -> all: "start these chunks, in this order"
  kOverdue = 3,   // rank -> leader: "this tensor has passed its deadline here" (a Report, too)
  kFail = 4,      // any -> all: "the group has failed, and this is why"
  kBye = 5,       // any -> all: "I have finished, and shall close once all have"
  kPlan = 6,      // leader -> all: "start these chunks, in this order, once you have them"
  kPing = 7,      // leader -> rank: "answer"
  kPong = 8,      // rank -> leader
};

// One tensor as one rank sees it. All ranks' reports of one id must agree.
struct Report {
  uint64_t key = 0;   // hash of the name
  uint64_t call = 0;  // how often that name was reduced before
  uint64_t numel = 0;
  uint64_t plan_hash = 0;
  int32_t priority = 0;
  uint8_t dtype = 0;
  uint8_t op = 0;
  uint8_t raw = 0;  // exchanged at once, without the leader's order
  uint8_t reserved = 0;
  uint32_t chunks = 0;
  char name[68] = {};  // for messages; cut to fit, NUL-terminated

  uint64_t id() const { return HashCombine(key, call); }
};
static_assert(sizeof(Report) == 112 && std::is_trivially_copyable_v<Report>);

// Of fp32 input, in the mean over the tensor's chunks.
size_t ChunkBytes(const Report& report);

struct Announcement {
  uint64_t id = 0;
  uint32_t chunk = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(Announcement) == 16 && std::is_trivially_copyable_v<Announcement>);

struct PlannedChunk {
  uint64_t id = 0;
  uint32_t chunk = 0;
  uint32_t window_kib = 0;  // PlanWindow's limit
  uint64_t plan_hash = 0;   // of the tensor
};
static_assert(sizeof(PlannedChunk) == 24 && std::is_trivially_copyable_v<PlannedChunk>);

void SetName(const std::string& name, Report* report);

std::vector<ControlFrame> PackReports(FrameType type, const std::vector<Report>& reports);
std::vector<ControlFrame> PackAnnouncements(const std::vector<Announcement>& announcements);
ControlFrame PackFailure(const absl::Status& reason);
std::vector<ControlFrame> PackPlan(const std::vector<PlannedChunk>& chunks);
ControlFrame PackSignal(FrameType type);  // kBye, kPing, kPong

// A frame taken apart. nullopt for one that no rank of this version sends.
struct Parsed {
  FrameType type;
  std::vector<Report> reports;
  std::vector<Announcement> announcements;
  std::vector<PlannedChunk> planned;
  absl::Status failure;
};
std::optional<Parsed> ParseFrame(const ControlFrame& frame);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_PROTOCOL_H_
