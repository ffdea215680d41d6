// What an engine has done since it was created.
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
  uint64_t all_reduces = 0;
  uint64_t raw_bytes = 0;       // what a ring allreduce of fp32 would have sent: 2 (n-1)/n * 4 N
  uint64_t wire_bytes = 0;      // what this rank sent, without control frames
  uint64_t planned_chunks = 0;  // whose order was foretold
  std::array<double, kStages> seconds{};  // summed over chunks, by Stage
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STATS_H_
