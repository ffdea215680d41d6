// Algorithm: what a chunk goes through: a two-hop allreduce, a two-level one over a grid of ranks,
// a hierarchical one over nodes, topk's exchange of entries, a raw exchange, a one-hop exchange, a
// copy in a world of one, a reduce-scatter, an all-gather, an all-to-all.
//
// An algorithm defines a chunk's shards and which residual each element has on a rank, and runs the
// chunk hop by hop. It knows neither threads nor transports: its caller carries out the hops.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_ALGORITHM_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_ALGORITHM_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/backend.h"
#include "compress/error_feedback.h"
#include "compress/float_memory.h"
#include "compress/types.h"
#include "schedule/hash.h"
#include "schedule/options.h"
#include "transport/membership.h"

namespace thinwire {

// Workspace: the codecs and scratch memory for running one chunk at a time. Both are on the host,
// or both on one device's stream; on a device the output is complete for later work of the stream.
//
// Scratch on the host grows to the largest chunk seen and is then reused: blocks are kept in the
// order of the requests, so repeated requests allocate nothing. On a device the caller provides the
// memory. Not thread-safe.
class Workspace {
 public:
  // Uses memory of the host. `backend` must outlive the workspace.
  Workspace(const Backend& backend, const Membership& members)
      : backend(backend), members(members) {}
  // Hands out `memory` from its start on, which must be aligned to a cache line.
  Workspace(const Backend& backend, const Membership& members, MutableBytes memory)
      : backend(backend), members(members), grows_(false), memory_(memory) {}
  // Has no memory, for the given reason.
  Workspace(const Backend& backend, const Membership& members, absl::Status reason)
      : backend(backend), members(members), grows_(false), status_(std::move(reason)) {}
  virtual ~Workspace() = default;

  const Backend& backend;
  const Membership members;  // the ranks that exchange the chunk

  // Takes back all memory that was handed out.
  void Reset() { next_ = used_ = 0; }

  // Returns `bytes` of memory, aligned to a cache line, valid until Reset, with undefined content.
  // If no memory is left the block is null: check status() before using any block.
  MutableBytes Take(size_t bytes);

  // Returns `count` blocks, which form one array if `bytes` keeps all of them aligned: planes that
  // implement an all-gather themselves require an array.
  std::vector<MutableBytes> TakeArray(size_t count, size_t bytes);

  template <typename T>
  std::span<T> TakeOf(size_t count) {
    return {reinterpret_cast<T*>(Take(count * sizeof(T)).data()), count};
  }

  const absl::Status& status() const { return status_; }
  // Bytes of the caller's memory that were handed out since Reset.
  size_t used() const { return used_; }

 private:
  struct Block {
    std::unique_ptr<uint8_t[]> memory;
    size_t bytes = 0;
  };
  MutableBytes TakeOfMemory(size_t bytes);

  const bool grows_ = true;
  const MutableBytes memory_;  // the caller's
  size_t used_ = 0;
  absl::Status status_;
  std::vector<Block> blocks_;
  size_t next_ = 0;
};

struct Algorithm;

// A part of a bucket that goes through one algorithm, as Partition cuts it.
struct Chunk {
  Range elements;              // in the partition's order
  std::vector<size_t> bounds;  // n + 1 values: shard s is [bounds[s], bounds[s + 1])
  std::vector<Range> pieces;   // where its elements lie in the bucket, one after another
  uint32_t codec = 0;          // index in Options::codecs
  size_t codec_offset = 0;     // index of its first element among those of its codec
  const Algorithm* algorithm = nullptr;
  int columns = 1;  // of the grid of ranks, if the algorithm uses one

  int world() const { return static_cast<int>(bounds.size()) - 1; }
  size_t numel() const { return elements.end - elements.begin; }
  // Shard `number`. Its owner is the rank of that number; in a grid see Grid::shard.
  Range shard(int number) const { return {bounds[number], bounds[number + 1]}; }
};

// One use of a chunk.
struct ChunkJob {
  uint64_t tag = 0;  // equal on all ranks, never used twice
  CodecPair codec;
  const Chunk* chunk = nullptr;
  TensorView input, output;  // the whole bucket; may be the same memory
  // One float per element of the whole bucket, in the partition's order, as ErrorFeedback::Bind
  // lays them out; null: no residual.
  float* residual = nullptr;
  Momentum momentum;              // dense: the global one, equal on all ranks; topk: the local one
  UndoLog* undo = nullptr;        // saves residuals and momentum before a change; null: no undo
  std::span<const Range> absent;  // in the partition's order of the whole bucket; see Operands
  float scale = 1.0f;             // 1/n for the mean, 1 for the sum; else 1/divisor
  // One float per chunk, kept from step to step; zero at first and after residuals were imported or
  // moved. topk: last step's threshold; hierarchical: whether other columns' residuals are zero.
  float* carried = nullptr;
  uint64_t tensor = 0;  // the tensor's key for the draws of stochastic rounding
  uint64_t step = 0;
};

// The stages of a chunk; the trace has one entry for each.
enum class Stage : uint8_t { kQueue, kEncode, kExchange, kReduce, kGather, kDecode };
inline constexpr int kStages = 6;
inline constexpr std::array<const char*, kStages> kStageNames = {"QUEUE",  "ENCODE", "EXCHANGE",
                                                                 "REDUCE", "GATHER", "DECODE"};

// The blocks that a later hop will receive, if they may arrive already; else empty.
struct Reception {
  uint64_t tag = 0;
  std::span<const MutableBytes> recv;
};

// The next exchange: send[r] goes to rank r, and recv[r] comes from it. Valid until the run
// advances or ends.
struct Hop {
  Stage made_in;  // the stage that ends when the hop begins
  Stage stage;    // the stage of the hop itself
  uint64_t tag;
  std::span<const Bytes> send;
  std::span<const MutableBytes> recv;
  // May arrive early: a peer sends its next hop's blocks once it has received ours of this hop.
  Reception next = {};
};

// A chunk under way. If dropped half-way, it leaves the chunk's residuals, and topk's momentum, in
// the state of a half-done step. All algorithms share this base class: phases with a hop
// after each but the last, the tags of hops, and the undo log. An algorithm implements Work. Not
// thread-safe.
class ChunkRun {
 public:
  virtual ~ChunkRun() = default;
  // The blocks that the first hop receives, if they may arrive before this rank has encoded its
  // own. Call before the first Advance.
  virtual Reception first() const { return {}; }
  // Works up to the next hop, which must have ended before the next call; null: the chunk is done.
  // Fails if a device has no memory, or if a peer's bytes are malformed (FailedPrecondition).
  absl::StatusOr<const Hop*> Advance();

 protected:
  // Resets the workspace.
  ChunkRun(const ChunkJob& job, Workspace& space);

  // Runs phase 0, 1, and so on. A phase that a hop follows calls Exchange; the last one does not.
  virtual absl::Status Work(int phase) = 0;
  // The ranges of residual and velocity that the run changes, saved for undo before phase 0.
  virtual std::span<const Range> Kept() const { return {&job_.chunk->elements, 1}; }

  // The next hop: send[r] goes to rank r, and recv[r] comes from it. `next`: the blocks that the
  // hop after it receives, if that may begin already.
  void Exchange(Stage made_in, Stage stage, std::span<const Bytes> send,
                std::span<const MutableBytes> recv, std::span<const MutableBytes> next = {});
  // For Exchange: one block for each rank, or the same block for all.
  std::span<const Bytes> Each(std::span<const MutableBytes> blocks);
  std::span<const Bytes> ToAll(Bytes block);

  // Scratch for ReduceArgs of at most `wires` wires and `numel` elements.
  std::span<float> TakeReduceScratch(size_t wires, size_t numel);

  // Hops count from 1.
  uint64_t Tag(int hop) const { return HashCombine(job_.tag, static_cast<uint64_t>(hop)); }

  const ChunkJob job_;
  Workspace& space_;
  const int n_, me_;

 private:
  std::vector<Bytes> send_;
  Hop hop_{};
  bool is_due_ = false;
  int phase_ = 0, hops_ = 0;
};

// The parts of `ranges` that lie in `within` and not in `without`, relative to within.begin.
std::vector<Range> Overlap(std::span<const Range> ranges, Range within, Range without);

// Operands: a chunk's elements in contiguous memory, with their residuals and momentum. The memory
// is the bucket's own if the chunk is one piece of it, a copy if it is not, and scratch for
// gradient plus momentum if the engine owns the momentum. In that last case a result that is also
// the new momentum goes directly to the bucket if the chunk is one piece.
//
// The engine owns the momentum of codecs whose feedback on the bare gradient would diverge: it
// reduces m_own = beta * m + g, with m the last decoded result, equal on all ranks; the decoded
// mean is the new m, which the optimizer applies. Tang et al., "1-bit Adam", arXiv 2102.02888,
// section 4, algorithm 1. Nesterov momentum as in torch.optim.SGD. If the new m is not finite,
// because a rank's gradient was not, the last m stays; all ranks decode the same m, so they decide
// alike.
//
// Absent parameters, without a gradient on this rank in this step, count as zeros, and their
// residuals wait for a step with a gradient: sent now, they would be lost if no rank uses the mean,
// as for a parameter without a gradient on any rank. The codec does not see these residuals; its
// own loss (onebit has no zero) is added to them afterwards, so the sums stay exact.
class Operands {
 public:
  // `job` and `space` must outlive this object.
  Operands(const ChunkJob& job, Workspace& space);
  ~Operands() { RestoreAbsent(); }
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;

  // Valid after Load, except outside of `needed` if momentum is fused into the encoding: those
  // elements come from Encoding.
  TensorView input() const { return input_; }
  TensorView output() const { return output_; }
  float* residual() const { return residual_; }

  // Gathers the elements, and sets the residuals of absent parameters aside. Elements outside of
  // `needed` (relative to the chunk's start) may only be encoded, with what Encoding returns.
  void Load(Range needed);
  void Load() { Load({0, numel_}); }
  // For EncodeAll: `elements` (relative to the chunk's start), with their residuals and momentum.
  EncodeArgs Encoding(Range elements) const;
  // Writes the results to the bucket, and restores the residuals that were set aside.
  void Store();

 private:
  template <typename Visit>
  void ForEachPiece(const TensorView& bucket, Visit visit);
  void FindAbsent();
  void SetAbsentAside();  // before the encoding
  // Undoes SetAbsentAside; no effect without it, or a second time.
  void RestoreAbsent();
  void EndMomentum(TensorView m, TensorView output, size_t offset);
  // True if the chunk is one piece of the bucket, which needs no copy.
  bool is_whole() const { return job_.chunk->pieces.size() == 1; }
  bool adds_momentum() const { return momentum_.velocity != nullptr; }

  const ChunkJob& job_;
  Workspace& space_;
  const size_t numel_;
  TensorView input_, output_;
  float* residual_ = nullptr;
  Range loaded_;
  bool copies_ = false;
  Momentum momentum_;  // of this chunk; velocity holds the last m until Store; null: no momentum
  std::span<float> with_momentum_;  // m_own, and later the new m
  struct Absent {
    std::span<float> kept, aside;
  };
  std::vector<Absent> absent_;  // residuals and velocities that are left out
  bool is_aside_ = false;
};

// The cost of a phase for the simulator: the elements that a rank works on, and the hop that
// follows.
struct PhaseCost {
  enum class To { kEverybody, kSome, kNode };  // kNode: only to ranks of the same node

  double encoded = 0.0, reduced = 0.0, decoded = 0.0;  // elements
  double bytes = 0.0;  // sent by a rank to all its peers together, averaged over the ranks
  int peers = 0;       // 0: no hop follows
  To to = To::kEverybody;
};

// Defaults for Algorithm: no rank owns a shard, all residuals belong to the first hop, and every
// rank's encoded chunk goes to every rank.
std::vector<size_t> OwnNothing(Range chunk, int world, size_t block);
Range NoSecondHop(const Chunk& chunk, int rank);
std::vector<PhaseCost> CostsOfOneHop(const Chunk& chunk, const CodecPair& codec);

// The values and functions of an algorithm. There is one object of each kind, never destroyed.
struct Algorithm {
  std::string_view name;
  int hops = 0;
  bool keeps_residuals = false;
  bool carries = false;        // uses ChunkJob::carried
  bool owns_momentum = false;  // its encoding applies momentum, so Operands adds none

  std::unique_ptr<ChunkRun> (*begin)(const ChunkJob& job, Workspace& space) = nullptr;
  // The n + 1 bounds of a chunk's shards: rank r owns [bounds[r], bounds[r + 1]), or in a grid the
  // shard of Grid::shard. Bounds are multiples of `block`, relative to the chunk's start.
  std::vector<size_t> (*shard_bounds)(Range chunk, int world, size_t block) = OwnNothing;
  // The elements whose residual on `rank` belongs to the second hop; the others' to the first.
  Range (*second_hop)(const Chunk& chunk, int rank) = NoSecondHop;
  // The costs of the phases of an fp32 chunk: `hops` phases with a hop, and the last one.
  std::vector<PhaseCost> (*costs)(const Chunk& chunk, const CodecPair& codec) = CostsOfOneHop;
};

// For Algorithm::begin: makes a `Run` from a job, a workspace and `kArguments`.
template <typename Run, auto... kArguments>
std::unique_ptr<ChunkRun> BeginRun(const ChunkJob& job, Workspace& space) {
  return std::make_unique<Run>(job, space, kArguments...);
}

// Dense codecs: a compressed reduce-scatter to owners, then a compressed all-gather.
const Algorithm& TwoHop();
// The same along the rows and then the columns of a grid of ranks, for large worlds.
const Algorithm& TwoLevel();
// The same with nodes as rows, which exchange uncompressed elements: for links between nodes that
// are slower than those inside.
const Algorithm& Hierarchical();
// topk: every rank's entries go to every rank, which adds them up in rank order.
const Algorithm& Entries();
// Small tensors: every rank's values go to every rank, which adds them up in rank order.
const Algorithm& Raw();
// Tensors with few wire bytes: the same with a dense codec.
const Algorithm& OneHop();
// A world of one: the mean and the sum are the tensor itself, or its momentum.
const Algorithm& Local();
// The first hop of TwoHop, ending in each rank's own shard of the result.
const Algorithm& ReduceScatter();
// The second hop of TwoHop, beginning with each rank's own elements.
const Algorithm& AllGather();
// Part r of each rank's elements goes to rank r, verbatim.
const Algorithm& AllToAll();

// Helpers of runs.

// True if the codec's wire bytes are the tensor's own bytes, without the padding.
inline bool IsVerbatim(const CodecSpec& spec, DType dtype) {
  return dtype == DType::kF32 && spec == LosslessSpec(dtype);
}

inline MutableBytes BytesOf(TensorView view) {
  return {static_cast<uint8_t*>(view.data), view.bytes()};
}

inline std::vector<const uint8_t*> Pointers(std::span<const MutableBytes> blocks) {
  std::vector<const uint8_t*> pointers;
  for (const MutableBytes& block : blocks) pointers.push_back(block.data());
  return pointers;
}

// The draws of stochastic rounding for elements from index `first` of their codec on. `hop`: 0 for
// the second hop, the sender's rank + 1 for the first, so that ranks draw independently.
inline Draws DrawsOf(const ChunkJob& job, const CodecSpec& spec, int hop, size_t first) {
  return {.key = HashCombine(HashCombine(spec.seed, job.tensor), static_cast<uint64_t>(hop)),
          .stream = job.step,
          .first = first};
}

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_ALGORITHM_H_
