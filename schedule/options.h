// Options: the settings of a process group.
//
// A new one that users can set takes four places: a field at the end of tw_options
// (integrations/c/thinwire.h); a field of Agreed or Own here, with its entry in ListAgreed if ranks
// must hold it alike; a line of ParseOptions (integrations/c/options.cc); and an entry of
// integrations/python/thinwire/options.py, from which the page of settings is written.
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

// Says when a step's order is predicted from the step before, in place of announcements that each
// cost two latencies. This concerns only steps that Engine::EndStep ends.
enum class Predict : uint8_t { kWhenFar, kAlways, kNever };

// How the ranks of a dense allreduce exchange: each with all others; along the rows and then the
// columns of a grid, which takes far fewer messages and one more rounding; or uncompressed within
// each node and compressed between nodes. kAuto follows schedule/collective/partition.h, and is
// kHierarchical where schedule/join/links.h finds faster links inside nodes.
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

// The data plane that a group is asked to use. gloo: Gloo's, which needs nothing else. ucx: UCX's,
// for ranks that share one host's memory. nccl: NCCL's, for ranks with GPUs of their own. auto:
// NCCL's where all ranks can, else UCX's, else Gloo's.
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

// Options that all ranks must hold alike; the handshake compares them.
struct Agreed {
  // A segment of a request names its codec by index; a request without segments uses the first.
  std::vector<CodecPair> codecs = std::vector<CodecPair>(1);
  // Momentum that the engine owns, where feedback on the bare gradient would diverge: see
  // schedule/collective/algorithm.h. A beta of 0 means none; the velocity is each tensor's own.
  Momentum momentum;
  Policy policy = Policy::kWfbp;
  int lanes = 4;                         // announced chunks in flight
  size_t chunk_bytes = size_t{4} << 20;  // of fp32 input; rounded down to whole blocks
  // A tensor whose raw bytes times (n - 1) peers are at most this goes raw, in one exchange.
  size_t min_bytes = size_t{64} << 10;
  // Every block between ranks travels with a CRC32C, and one that came damaged fails the group.
  bool checksum = false;
  Topology topology = Topology::kAuto;
  // Ranks of a node, which are neighbours: [0, local_size) and so on. 0: as they are found.
  int local_size = 0;
  TransportKind transport = TransportKind::kGloo;
  // Threads that move the bytes over TCP, each with connections of its own to all ranks.
  int loops = 1;
};

// Each rank's own. Rank 0's `predict` counts for all.
struct Own {
  std::chrono::milliseconds timeout{30000};  // of one collective, from its submission
  Predict predict = Predict::kWhenFar;
  // A collective that failed half-way can be taken back (ErrorFeedback::Undo), at the price of as
  // much memory again as residuals and momentum take.
  bool recoverable = false;
  std::string trace_path;   // Chrome JSON written at close; empty means no trace
  std::string flight_path;  // the last events, written with the first failure; empty means nowhere
};

// Constants, the same on all ranks, which no user can set; tests do.
struct Tuning {
  // Predicted chunks under way at most, beside those that wait for their rank. The window of bytes
  // (StartQueue) says how many there are; a far link takes as many as are on their way in its
  // latency (decision 6).
  int predicted_lanes = 256;
  // Settle makes chunk_bytes larger in a large world, so that messages hold this on average; see
  // schedule/collective/settle.h. 0, as where the user sets chunk_bytes: never.
  size_t least_message_bytes = size_t{64} << 10;
  // A tensor that is larger than min_bytes goes in one exchange as well, encoded, if its wire bytes
  // times (n - 1) peers are at most this: see schedule/collective/partition.h, which is also where
  // a min_bytes of 0 means never.
  size_t one_hop_bytes = size_t{512} << 10;
  std::chrono::microseconds far{1000};  // one way, to the farthest rank; measured at the start
  // From so many ranks on, reports and announcements go through heads of groups; see
  // schedule/order/sequencer.h.
  int control_tree_from = 65;
};

struct Options : Agreed, Own, Tuning {};

// One option that all ranks hold alike, for messages.
struct AgreedOption {
  std::string name;   // as users know it, such as "lanes"
  std::string value;  // as text without spaces, such as "4"
  std::string range;  // in words if the value is out of it, such as "1 to 64"; else empty
};

// Every field of Agreed, as it is in a world of that size: the handshake and CheckOptions go by
// this list.
std::vector<AgreedOption> ListAgreed(const Options& options, int world);

// InvalidArgument for a value that is out of its range.
absl::Status CheckOptions(const Options& options);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_OPTIONS_H_
