// What a process group is set up with. Everything here but the deadline and the trace must be equal
// on all ranks; the handshake compares it.
#ifndef THINWIRE_SCHEDULE_OPTIONS_H_
#define THINWIRE_SCHEDULE_OPTIONS_H_

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "compress/codec_spec.h"
#include "schedule/momentum.h"

namespace thinwire {

// Which of the chunks that all ranks have ready goes first. fifo: of the tensor that was submitted
// first. wfbp: of the one that was ready first. p3: of the lowest AllReduceRequest::priority, so
// that a chunk overtakes those that have not started; Jayarajan et al., "Priority-based Parameter
// Propagation", arXiv 1905.03960, section 4.
enum class Policy : uint8_t { kFifo = 0, kWfbp = 1, kP3 = 2 };

constexpr std::string_view Name(Policy policy) {
  switch (policy) {
    case Policy::kFifo: return "fifo";
    case Policy::kWfbp: return "wfbp";
    case Policy::kP3: return "p3";
  }
  return "unknown policy";
}

// Whether a step's order is foretold from the step before, in place of announcements that each cost
// two latencies. Only of steps that Engine::EndStep ends.
enum class Foresee : uint8_t { kWhenFar, kAlways, kNever };

struct Options {
  // A segment of a request names its codec by index; the first is what goes without saying.
  std::vector<CodecPair> codecs = {CodecPair{}};
  // Momentum that the engine owns and compresses in place of the bare gradient; a beta of 0: none.
  MomentumOptions momentum;
  Policy policy = Policy::kWfbp;
  int lanes = 4;                         // chunks in flight
  size_t chunk_bytes = size_t{4} << 20;  // of fp32 input; rounded down to whole blocks
  // A tensor whose raw bytes times (n - 1) peers are at most this goes raw, in one exchange.
  size_t min_bytes = size_t{64} << 10;
  std::chrono::milliseconds timeout{30000};  // of one allreduce, from its submission
  Foresee foresee = Foresee::kWhenFar;
  std::chrono::microseconds far{1000};  // one way, to the farthest rank; measured at the start
  std::string trace_path;               // Chrome JSON written at close; empty = no trace
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_OPTIONS_H_
