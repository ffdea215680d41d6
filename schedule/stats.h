// Counters of an engine since it was created.
#ifndef THINWIRE_SCHEDULE_STATS_H_
#define THINWIRE_SCHEDULE_STATS_H_

#include <array>
#include <cstdint>

namespace thinwire {

// The stages of a chunk's life; one row entry each in the trace.
enum class Stage : uint8_t { kQueue, kEncode, kExchange, kReduce, kGather, kDecode };
inline constexpr int kStages = 6;
inline constexpr std::array<const char*, kStages> kStageNames = {"QUEUE",  "ENCODE", "EXCHANGE",
                                                                 "REDUCE", "GATHER", "DECODE"};

struct Stats {
  uint64_t all_reduces = 0;  // collectives of any kind
  uint64_t raw_bytes = 0;    // that a ring of fp32 would have sent: 2 (n-1)/n * 4 N of an allreduce
  uint64_t wire_bytes = 0;   // that this rank sent, without control frames
  uint64_t predicted_chunks = 0;
  std::array<double, kStages> seconds{};  // summed over chunks, by Stage
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STATS_H_
