// Algorithm: what a chunk goes through. A two-hop allreduce, a two-level one over a grid of ranks,
// a hierarchical one over nodes, topk's exchange of entries, a raw exchange, a copy in a world of
// one, a reduce-scatter, an all-gather, an all-to-all.
//
// An algorithm says how a chunk is cut into shards, which residual each element has on a rank, and
// runs the chunk hop by hop. It knows neither threads nor transports: whoever runs it carries out
// the hops.
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

// Workspace: the means to run one chunk at a time with, codecs and scratch memory. Both are of the
// host, or both of one device's stream; on a device the output is there for later work of the
// stream.
//
// Memory of the host grows to the largest chunk seen and is then reused: blocks are kept in the
// order in which they were requested, so the same requests again allocate nothing. On a device it
// is memory of the caller. Not thread-safe.
class Workspace {
 public:
  // `backend` outlives it. Memory of the host.
  Workspace(const Backend& backend, const Membership& members)
      : backend(backend), members(members) {}
  // Hands out that memory from its begin on, which is aligned to a cache line.
  Workspace(const Backend& backend, const Membership& members, MutableBytes memory)
      : backend(backend), members(members), grows_(false), memory_(memory) {}
  // There is none, for that reason.
  Workspace(const Backend& backend, const Membership& members, absl::Status reason)
      : backend(backend), members(members), grows_(false), status_(std::move(reason)) {}
  virtual ~Workspace() = default;

  const Backend& backend;
  const Membership members;  // that the chunk is exchanged among

  // Forgets what was handed out.
  void Reset() { next_ = used_ = 0; }

  // `bytes` of memory, aligned to a cache line, valid until Reset. Its content is whatever it was.
  // Where there is none left the block is null: look at status() before using any.
  MutableBytes Take(size_t bytes);

  // `count` of them, which follow one another in one array where all stay aligned by that: planes
  // that have a gather of their own need its blocks so.
  std::vector<MutableBytes> TakeArray(size_t count, size_t bytes);

  template <typename T>
  std::span<T> TakeOf(size_t count) {
    return {reinterpret_cast<T*>(Take(count * sizeof(T)).data()), count};
  }

  const absl::Status& status() const { return status_; }
  // The bytes of the caller's memory that were handed out since Reset.
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
  std::vector<size_t> bounds;  // n + 1 of them: shard s is [bounds[s], bounds[s + 1])
  std::vector<Range> pieces;   // where its elements lie in the bucket, one after another
  uint32_t codec = 0;          // of Options::codecs
  size_t codec_offset = 0;     // of its first element among those of its codec
  const Algorithm* algorithm = nullptr;
  int columns = 1;  // of the grid that its ranks form, where the algorithm uses one

  int world() const { return static_cast<int>(bounds.size()) - 1; }
  size_t numel() const { return elements.end - elements.begin; }
  // Its owner is the rank of that number, or in a grid that of Grid::shard.
  Range shard(int number) const { return {bounds[number], bounds[number + 1]}; }
};

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
  std::span<const Range> absent;  // of the bucket in the partition's order: Operands
  float scale = 1.0f;             // 1/n for the mean, 1 for the sum; else 1/divisor
  // A float of this chunk, kept from step to step; zero at first and when residuals have come from
  // elsewhere. topk: last step's threshold; nodes: whether other columns' residuals are zero.
  float* carried = nullptr;
  uint64_t tensor = 0;  // the tensor's key in the draws of stochastic rounding
  uint64_t step = 0;
};

// The stages of a chunk's life; one row entry each in the trace.
enum class Stage : uint8_t { kQueue, kEncode, kExchange, kReduce, kGather, kDecode };
inline constexpr int kStages = 6;
inline constexpr std::array<const char*, kStages> kStageNames = {"QUEUE",  "ENCODE", "EXCHANGE",
                                                                 "REDUCE", "GATHER", "DECODE"};

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
// those of a step half done. It keeps what all algorithms' runs share: phases with a hop after each
// but the last, the tags of hops, and the undo log. An algorithm fills in Work. Not thread-safe.
class ChunkRun {
 public:
  virtual ~ChunkRun() = default;
  // Where the first hop receives, if its blocks may come before this rank has encoded its own.
  // Asked before the first Advance.
  virtual Reception first() const { return {}; }
  // Works up to the next hop, which must be over before the next call; null: the chunk is done.
  // Fails where a device has no memory, or where a peer's bytes are malformed (FailedPrecondition).
  absl::StatusOr<const Hop*> Advance();

 protected:
  // The workspace's memory is handed out anew.
  ChunkRun(const ChunkJob& job, Workspace& space);

  // Phase 0, 1, and so on. A phase that a hop follows ends in Exchange; one that does not is the
  // last.
  virtual absl::Status Work(int phase) = 0;
  // The ranges of job.residual and job.momentum.velocity that the run changes. They are saved
  // before phase 0.
  virtual std::span<const Range> Kept() const { return {&job_.chunk->elements, 1}; }

  // The next hop: send[r] goes to rank r, and recv[r] comes from it. `next`: where the hop after it
  // receives, if that may begin already.
  void Exchange(Stage made_in, Stage stage, std::span<const Bytes> send,
                std::span<const MutableBytes> recv, std::span<const MutableBytes> next = {});
  // For Exchange: these blocks, or one block for everybody.
  std::span<const Bytes> Each(std::span<const MutableBytes> blocks);
  std::span<const Bytes> ToAll(Bytes block);

  // Scratch for ReduceArgs of so many wires, or fewer of them, or fewer elements.
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

// The parts of `ranges` that lie in `within`, and not in `without`; counted from within.begin.
std::vector<Range> Overlap(std::span<const Range> ranges, Range within, Range without);

// Operands: a chunk's elements, contiguous, with what is kept of them between steps. They are the
// bucket's own memory where a chunk lies there in one piece, a copy where it does not, and the
// momentum's where the engine owns one. A result that is the new momentum still goes to the bucket
// at once, where a chunk is one piece.
//
// The engine owns the momentum of codecs whose feedback on the bare gradient would diverge: it
// reduces m_own = beta * m + g, with m the last decoded result, equal on all ranks; the decoded
// mean is the new m, and what the optimizer applies. Tang et al., "1-bit Adam", arXiv 2102.02888,
// section 4, algorithm 1. Nesterov as torch.optim.SGD. Where the new m is not finite, because a
// rank's gradient was not, the last one stays. All ranks decode the same m, so all decide alike.
//
// Parameters that this rank has no gradient for in this step count as zeros, and their residuals
// wait for a step that has a gradient: sent now they would be lost where nobody uses the mean, as
// for a parameter that no rank has a gradient for. The codec sees nothing of these residuals, and
// its own loss (onebit has no zero) is added to them afterwards, so that the bookkeeping stays
// exact.
class Operands {
 public:
  // `job` and the workspace outlive it.
  Operands(const ChunkJob& job, Workspace& space);
  ~Operands() { RestoreAbsent(); }
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;

  // Valid after Load, except outside of `needed` where momentum is fused into the encoding: there
  // Encoding says what to encode.
  TensorView input() const { return input_; }
  TensorView output() const { return output_; }
  float* residual() const { return residual_; }

  // Brings the elements together; residuals of what this rank has no gradient for step aside. All
  // elements outside of `needed`, which counts from the chunk's begin, are only encoded, from what
  // Encoding returns.
  void Load(Range needed);
  void Load() { Load({0, numel_}); }
  // For EncodeAll: elements, counted from the chunk's begin, their residuals and their momentum.
  EncodeArgs Encoding(Range elements) const;
  // Puts the results where they belong, and those residuals back.
  void Store();

 private:
  template <typename Visit>
  void ForEachPiece(const TensorView& bucket, Visit visit);
  void FindAbsent();
  void SetAbsentAside();  // before the encoding
  // Undoes SetAbsentAside; without one, or a second time, it does nothing.
  void RestoreAbsent();
  void EndMomentum(TensorView m, TensorView output, size_t offset);
  // One piece of the bucket needs no copy.
  bool is_whole() const { return job_.chunk->pieces.size() == 1; }
  bool adds_momentum() const { return momentum_.velocity != nullptr; }

  const ChunkJob& job_;
  Workspace& space_;
  const size_t numel_;
  TensorView input_, output_;
  float* residual_ = nullptr;
  Range loaded_;
  bool copies_ = false;
  Momentum momentum_;  // of this chunk; its velocity holds the last m until Store. Null: none
  std::span<float> with_momentum_;  // m_own, and where the chunk may leave the new m
  struct Absent {
    std::span<float> kept, aside;
  };
  std::vector<Absent> absent_;  // ranges of what is kept, which take no part
  bool is_aside_ = false;
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

// For Algorithm: by default nobody owns anything, all residuals are of the first hop, and
// everybody's encoded chunk goes to everybody.
std::vector<size_t> OwnNothing(Range chunk, int world, size_t block);
Range NoSecondHop(const Chunk& chunk, int rank);
std::vector<PhaseCost> CostsOfOneHop(const Chunk& chunk, const CodecPair& codec);

// The values and functions that an algorithm consists of. There is one object of each kind, which
// lives for ever.
struct Algorithm {
  std::string_view name;
  int hops = 0;
  bool keeps_residuals = false;
  bool carries = false;        // it uses ChunkJob::carried
  bool owns_momentum = false;  // its encoding has momentum of its own: Operands adds none

  std::unique_ptr<ChunkRun> (*begin)(const ChunkJob& job, Workspace& space) = nullptr;
  // The n + 1 bounds of a chunk's shards: rank r owns [bounds[r], bounds[r + 1]), or in a grid the
  // shard of Grid::shard. Bounds are multiples of `block` from the chunk's begin.
  std::vector<size_t> (*shard_bounds)(Range chunk, int world, size_t block) = OwnNothing;
  // The elements whose residual on `rank` is of the second hop; that of all others is of the first.
  Range (*second_hop)(const Chunk& chunk, int rank) = NoSecondHop;
  // The phases of a chunk of fp32: `hops` with a hop, and the last one.
  std::vector<PhaseCost> (*costs)(const Chunk& chunk, const CodecPair& codec) = CostsOfOneHop;
};

// For Algorithm::begin: a `Run`, made of a job, a workspace and `kArguments`.
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

// The draws of stochastic rounding of elements from `first` on, counted within their codec. `hop`:
// of the second one 0, and of the first one the sender's rank + 1, so that ranks draw
// independently.
inline Draws DrawsOf(const ChunkJob& job, const CodecSpec& spec, int hop, size_t first) {
  return {.key = HashCombine(HashCombine(spec.seed, job.tensor), static_cast<uint64_t>(hop)),
          .stream = job.step,
          .first = first};
}

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_ALGORITHM_H_
