// Options: the settings of a process group.
//
// A new option that users can set is added in four places: a field at the end of tw_options
// (integrations/c/thinwire.h); a field of Agreed or Own here, with its entry in ListAgreed if it
// must be equal on all ranks; a line of ParseOptions (integrations/c/options.cc); and an entry in
// integrations/python/thinwire/options.py, from which the settings page is generated.
#ifndef THINWIRE_SCHEDULE_OPTIONS_H_
#define THINWIRE_SCHEDULE_OPTIONS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "compress/codec_spec.h"

namespace thinwire {

// The rule that ranks the chunks that all ranks have ready. fifo: the tensor that was submitted
// first goes first. wfbp: the tensor that was ready first. p3: the tensor of the lowest priority
// number, so that a chunk overtakes those that have not started; Jayarajan et al., "Priority-based
// Parameter Propagation", arXiv 1905.03960, section 4.
enum class Policy : uint8_t { kFifo = 0, kWfbp = 1, kP3 = 2 };

constexpr std::string_view Name(Policy policy) {
  switch (policy) {
    case Policy::kFifo: return "fifo";
    case Policy::kWfbp: return "wfbp";
    case Policy::kP3: return "p3";
  }
  return "unknown policy";
}

// When to predict a step's order from the step before, in place of announcements, which cost two
// latencies each. Applies only to steps that Engine::EndStep ends.
enum class Predict : uint8_t { kWhenFar, kAlways, kNever };

// How the ranks of a dense allreduce exchange: each with all others; along the rows and then the
// columns of a grid, with far fewer messages and one more rounding; or uncompressed within each
// node and compressed between nodes. kAuto follows schedule/collective/partition.h, or
// schedule/join/links.h if there are several nodes.
enum class Topology : uint8_t { kAuto = 0, kFlat = 1, kGrid = 2, kHierarchical = 3 };

constexpr std::string_view Name(Topology topology) {
  switch (topology) {
    case Topology::kAuto: return "auto";
    case Topology::kFlat: return "flat";
    case Topology::kGrid: return "grid";
    case Topology::kHierarchical: return "hierarchical";
  }
  return "unknown topology";
}

// The data plane that a group uses. gloo: Gloo, which requires nothing else. ucx: UCX, for ranks
// that share one host's memory. nccl: NCCL, for ranks that each have a GPU. auto: NCCL if all ranks
// can use it, else UCX, else Gloo.
enum class TransportKind : uint8_t { kGloo, kUcx, kAuto, kNccl };

constexpr std::string_view Name(TransportKind kind) {
  switch (kind) {
    case TransportKind::kGloo: return "gloo";
    case TransportKind::kUcx: return "ucx";
    case TransportKind::kAuto: return "auto";
    case TransportKind::kNccl: return "nccl";
  }
  return "unknown transport";
}

// Options that must be equal on all ranks; the handshake compares them.
struct Agreed {
  // A segment of a request names its codec by index; a request without segments uses the first.
  std::vector<CodecPair> codecs = std::vector<CodecPair>(1);
  // Momentum inside the engine, for codecs whose feedback on the bare gradient would diverge: see
  // schedule/collective/algorithm.h. Each tensor has its own velocity. beta 0: no momentum.
  Momentum momentum;
  Policy policy = Policy::kWfbp;
  int lanes = 4;                         // announced chunks in flight
  size_t chunk_bytes = size_t{4} << 20;  // of fp32 input; rounded down to whole blocks
  // A tensor whose raw bytes times (ranks - 1) are at most this goes raw, in one exchange.
  size_t min_bytes = size_t{64} << 10;
  // Sends a CRC32C with every block; a block that arrives damaged fails the group.
  bool checksum = false;
  Topology topology = Topology::kAuto;
  // Ranks per node: node i has ranks [i * local_size, (i + 1) * local_size). 0: nodes are detected.
  int local_size = 0;
  TransportKind transport = TransportKind::kGloo;
  // Threads that move bytes over TCP, each with its own connections to all ranks.
  int loops = 1;
};

// Options that may differ between ranks. Rank 0's `predict` applies to all.
struct Own {
  std::chrono::milliseconds timeout{30000};  // of one collective, from its submission
  Predict predict = Predict::kWhenFar;
  // A failed collective can be undone (ErrorFeedback::Undo). Residuals and momentum then take twice
  // the memory.
  bool recoverable = false;
  std::string trace_path;   // Chrome JSON written at close; empty means no trace
  std::string flight_path;  // the last events, written with the first failure; empty means nowhere
};

// Constants, equal on all ranks, which no user can set; tests do.
struct Tuning {
  // The most predicted chunks under way, not counting those that wait for their rank. The window of
  // bytes (StartQueue) decides how many there are; a link with a long latency needs as many as it
  // carries in that time (decision 6).
  int predicted_lanes = 256;
  // Settle makes chunk_bytes larger in a large world, so that messages have this size on average;
  // see schedule/collective/settle.h. 0, also set when the user sets chunk_bytes: never.
  size_t least_message_bytes = size_t{64} << 10;
  // A tensor that is larger than min_bytes still goes in one exchange, encoded, if its wire bytes
  // times (n - 1) are at most this: see schedule/collective/partition.h. Never if min_bytes is 0.
  size_t one_hop_bytes = size_t{512} << 10;
  // Predict::kWhenFar predicts if the one-way latency to the farthest rank, measured at the start,
  // is above this.
  std::chrono::microseconds far{1000};
  // From this many ranks on, reports and announcements go through group heads; see
  // schedule/order/sequencer.h.
  int control_tree_from = 65;
};

struct Options : Agreed, Own, Tuning {};

// One option that must be equal on all ranks, as text for messages.
struct AgreedOption {
  std::string name;   // as users know it, such as "lanes"
  std::string value;  // as text without spaces, such as "4"
  // The allowed range, such as "1 to 64", if the value is outside it; else empty.
  std::string range;
};

// Every field of Agreed, and one_hop_bytes, for `world` ranks: the list for the handshake and
// CheckOptions.
std::vector<AgreedOption> ListAgreed(const Options& options, int world);

// InvalidArgument if a value is out of range.
absl::Status CheckOptions(const Options& options);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_OPTIONS_H_
