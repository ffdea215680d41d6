// Algorithm: what a chunk goes through. A two-hop allreduce, a two-level one over a grid of ranks,
// a hierarchical one over nodes, topk's exchange of entries, a raw exchange, a copy in a world of
// one, a reduce-scatter, an all-gather, an all-to-all.
//
// An algorithm says how a chunk is cut into shards, which residual each element has on a rank, and
// runs the chunk hop by hop. It knows neither threads nor transports: whoever runs it carries out
// the hops.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_ALGORITHM_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_ALGORITHM_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/backend.h"
#include "compress/undo_log.h"
#include "schedule/collective/partition.h"
#include "schedule/collective/scratch.h"
#include "schedule/options.h"
#include "schedule/stats.h"
#include "transport/membership.h"

namespace thinwire {

// One use of a chunk.
struct ChunkJob {
  uint64_t tag = 0;  // equal on all ranks, never used twice
  CodecPair codec;
  const Chunk* chunk = nullptr;
  TensorView input, output;  // the whole bucket; may be the same memory
  // One float an element of the whole bucket in the partition's order, as ErrorFeedback::Bind lays
  // them out; null means none.
  float* residual = nullptr;
  Momentum momentum;              // dense: the global one, equal on all ranks; topk: the local one
  UndoLog* undo = nullptr;        // where what is kept goes before it is changed; null: nowhere
  std::span<const Range> absent;  // of the bucket in the partition's order: operands.h
  float scale = 1.0f;             // 1/n for the mean, 1 for the sum; else 1/divisor
  // A float of this chunk, kept from step to step; zero at first and when residuals have come from
  // elsewhere. topk: last step's threshold; nodes: whether other columns' residuals are zero.
  float* carried = nullptr;
  uint64_t tensor = 0;  // the tensor's key in the draws of stochastic rounding
  uint64_t step = 0;
};

// The means to run a chunk with: all of the host, or all of one device's stream; on a device the
// output is there for later work of the stream.
struct Bench {
  const Backend& backend;
  Scratch& scratch;  // of this chunk alone
  Membership members;
};

// The blocks that a later hop will receive, if they may arrive already; else empty.
struct Reception {
  uint64_t tag = 0;
  std::span<const MutableBytes> recv;
};

// An exchange that is due: send[r] goes to rank r, and recv[r] comes from it. Valid until the run
// advances or ends.
struct Hop {
  Stage made_in;  // the stage that ends where the hop begins
  Stage stage;    // the stage of the hop itself
  uint64_t tag;
  std::span<const Bytes> send;
  std::span<const MutableBytes> recv;
  // May arrive early: a peer sends its next hop's blocks once it has received ours of this hop.
  Reception next = {};
};

// A chunk on its way. Dropped half-way, it leaves the chunk's residuals, and topk's momentum, as
// those of a step half done. Not thread-safe.
class ChunkRun {
 public:
  virtual ~ChunkRun() = default;
  // Where the first hop receives, if its blocks may come before this rank has encoded its own.
  // Asked before the first Advance.
  virtual Reception first() const { return {}; }
  // Works up to the next hop, which must be over before the next call; null: the chunk is done.
  // Fails where a device has no memory, or where a peer's bytes are malformed (FailedPrecondition).
  virtual absl::StatusOr<const Hop*> Advance() = 0;
};

// A phase of a chunk as a simulator counts it: the elements that a rank works on, and the hop that
// follows.
struct PhaseCost {
  enum class To { kEverybody, kSome, kNode };  // kNode: only to ranks of the own node

  double encoded = 0.0, reduced = 0.0, decoded = 0.0;  // elements
  double bytes = 0.0;  // that a rank sends then, to all peers together, in the mean over the ranks
  int peers = 0;       // 0: no hop follows
  To to = To::kEverybody;
};

// Stateless; there is one object of each kind, which lives for ever.
class Algorithm {
 public:
  struct Traits {
    std::string_view name;
    int hops = 0;
    bool keeps_residuals = false;
    bool carries = false;        // it uses ChunkJob::carried
    bool owns_momentum = false;  // its encoding has momentum of its own: Operands adds none
  };
  explicit Algorithm(const Traits& traits) : traits_(traits) {}
  virtual ~Algorithm() = default;

  std::string_view name() const { return traits_.name; }
  int hops() const { return traits_.hops; }
  bool keeps_residuals() const { return traits_.keeps_residuals; }
  bool carries() const { return traits_.carries; }
  bool owns_momentum() const { return traits_.owns_momentum; }

  // The n + 1 bounds of a chunk's shards: rank r owns [bounds[r], bounds[r + 1]), or in a grid the
  // shard of Grid::shard. Bounds are multiples of `block` from the chunk's begin. By default nobody
  // owns anything.
  virtual std::vector<size_t> ShardBounds(Range chunk, int world, size_t block) const;
  // The elements whose residual on `rank` is of the second hop; that of all others is of the first.
  virtual Range SecondHop(const Chunk& chunk, int rank) const;
  // The phases of a chunk of fp32: hops() with a hop, and the last one. By default everybody's
  // encoded chunk goes to everybody.
  virtual std::vector<PhaseCost> Costs(const Chunk& chunk, const CodecPair& codec) const;

  virtual std::unique_ptr<ChunkRun> Begin(const ChunkJob& job, const Bench& bench) const = 0;

 private:
  const Traits traits_;
};

// Dense codecs: a compressed reduce-scatter to owners, then a compressed all-gather.
const Algorithm& TwoHop();
// The same along the rows and then the columns of a grid of ranks, for large worlds.
const Algorithm& TwoLevel();
// The same with nodes as rows, which exchange uncompressed elements: for links between nodes that
// are slower than those inside.
const Algorithm& Hierarchical();
// topk: everybody's entries go to everybody, who adds them up in rank order.
const Algorithm& Entries();
// Small tensors: everybody's values go to everybody, who adds them up in rank order.
const Algorithm& Raw();
// Tensors of few wire bytes: the same with a dense codec's bytes.
const Algorithm& OneHop();
// A world of one: the mean and the sum of one tensor are that tensor, or its momentum.
const Algorithm& Local();
// The first hop of TwoHop, ending in each rank's own shard of the result.
const Algorithm& ReduceScatter();
// The second hop of TwoHop, beginning with each rank's own elements.
const Algorithm& AllGather();
// Part r of each rank's elements goes to rank r, verbatim.
const Algorithm& AllToAll();

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_ALGORITHM_H_
