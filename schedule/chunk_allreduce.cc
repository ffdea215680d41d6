#include "schedule/chunk_allreduce.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "schedule/absence.h"
#include "schedule/hash.h"

namespace thinwire {
namespace {

// What the phases work on: the chunk alone, its elements contiguous.
struct Operands {
  TensorView input, output;
  float* residual;
};

// Brings a chunk's elements together and back: from the bucket itself where they are contiguous,
// from copies where they are not, and from the momentum where the engine owns one.
class Desk {
 public:
  Desk(const ChunkJob& job, const Backend& backend, LaneBuffers& buffers)
      : job_(job), backend_(backend), numel_(job.chunk->numel()) {
    const size_t begin = job.chunk->elements.begin;
    if (job.residual != nullptr) work_.residual = job.residual + begin;
    if (job.velocity != nullptr && !job.chunk->sparse) {
      const std::span<float> m(job.velocity + begin, numel_);
      momentum_.emplace(job.momentum, m,
                        buffers.TakeOf<float>(MomentumStep::ScratchFloats(job.momentum, numel_)));
      work_.input = work_.output = {m.data(), numel_};
    } else if (job.chunk->pieces.size() > 1) {
      const MutableBytes copy = buffers.Take(numel_ * SizeOf(job.input.dtype));
      work_.input = work_.output = {copy.data(), numel_, job.input.dtype};
      copies_ = true;
    } else {
      const Range piece = job.chunk->pieces[0];
      work_.input = job.input.Slice(piece.begin, numel_);
      work_.output = job.output.Slice(piece.begin, numel_);
    }
  }

  const Operands& operands() const { return work_; }

  void Load() {
    ForEachPiece(job_.input, [&](TensorView piece, size_t at) {
      if (momentum_.has_value()) momentum_->Before(backend_, piece, at);
      if (copies_) backend_.Copy(work_.input.Slice(at, 0).data, piece.data, piece.bytes());
    });
  }

  void Store() {
    ForEachPiece(job_.output, [&](TensorView piece, size_t at) {
      if (momentum_.has_value()) momentum_->After(backend_, piece, at);
      if (copies_) backend_.Copy(piece.data, work_.output.Slice(at, 0).data, piece.bytes());
    });
  }

 private:
  template <typename Visit>
  void ForEachPiece(const TensorView& bucket, Visit visit) {
    size_t at = 0;
    for (const Range& piece : job_.chunk->pieces) {
      const size_t count = piece.end - piece.begin;
      visit(bucket.Slice(piece.begin, count), at);
      at += count;
    }
  }

  const ChunkJob& job_;
  const Backend& backend_;
  const size_t numel_;
  Operands work_{};
  bool copies_ = false;
  std::optional<MomentumStep> momentum_;
};

// A chunk's shards: their elements, residuals and draws, and where their wire bytes lie. fp32 of an
// f32 tensor needs no copy: there the wire bytes are the tensor's own, without the padding.
class Shards {
 public:
  Shards(const ChunkJob& job, const Operands& work, int rank, int ranks, LaneBuffers& buffers)
      : job_(job),
        work_(work),
        rank_(rank),
        verbatim_(job.codec == CodecPair{} && work.input.dtype == DType::kF32),
        outgoing_(ranks),
        incoming_(ranks),
        results_(ranks) {
    for (int r = 0; r < ranks; ++r) {
      results_[r] = Room(job.codec.down, work.output, r, buffers);
      if (r == rank_) continue;
      outgoing_[r] = Room(job.codec.up, work.input, r, buffers);
      incoming_[r] = buffers.Take(verbatim_ ? Numel(rank_) * sizeof(float)
                                            : EncodedBytes(job.codec.up, Numel(rank_)));
    }
  }

  bool verbatim() const { return verbatim_; }
  TensorView input(int r) const { return work_.input.Slice(Begin(r), Numel(r)); }
  TensorView output(int r) const { return work_.output.Slice(Begin(r), Numel(r)); }
  float* residual(int r) const {
    return work_.residual == nullptr ? nullptr : work_.residual + Begin(r);
  }
  MutableBytes outgoing(int r) const {
    return outgoing_[r];
  }  // rank r's shard, encoded by this one
  const std::vector<MutableBytes>& incoming() const { return incoming_; }  // the own one, by others
  const std::vector<MutableBytes>& results() const { return results_; }    // each by its owner

  // `hop`: of the second one 0, and of the first one the sender's rank + 1, so that ranks draw
  // independently.
  Draws draws(const CodecSpec& spec, int hop, int r) const {
    return {.key = HashCombine(HashCombine(spec.seed, job_.tensor), static_cast<uint64_t>(hop)),
            .stream = job_.step,
            .first = job_.chunk->place + Begin(r)};
  }

 private:
  size_t Begin(int r) const { return job_.chunk->shard(r).begin - job_.chunk->elements.begin; }
  size_t Numel(int r) const { return job_.chunk->shard(r).end - job_.chunk->shard(r).begin; }

  // Of the tensor's memory if verbatim, else of the lane's.
  MutableBytes Room(const CodecSpec& spec, TensorView chunk, int r, LaneBuffers& buffers) const {
    if (!verbatim_) return buffers.Take(EncodedBytes(spec, Numel(r)));
    const TensorView part = chunk.Slice(Begin(r), Numel(r));
    return {static_cast<uint8_t*>(part.data), part.bytes()};
  }

  const ChunkJob& job_;
  const Operands& work_;
  const int rank_;
  const bool verbatim_;
  std::vector<MutableBytes> outgoing_, incoming_, results_;
};

absl::Status AllReduceDense(const ChunkJob& job, const Operands& work, const Backend& backend,
                            Transport& transport, LaneBuffers& buffers, StageClock& clock) {
  const int n = transport.size();
  const int me = transport.rank();
  const CodecSpec &up = job.codec.up, &down = job.codec.down;
  const Shards shards(job, work, me, n, buffers);
  if (!buffers.status().ok()) return buffers.status();
  std::vector<Bytes> send(n);

  // (1) Encode the n - 1 foreign shards, with the first-hop residuals.
  std::vector<EncodeArgs> foreign;
  for (int r = 0; r < n; ++r) {
    if (r == me) continue;
    send[r] = shards.outgoing(r);
    EncodeExtras extras;
    extras.draws = shards.draws(up, me + 1, r);
    foreign.push_back({shards.input(r), shards.residual(r), shards.outgoing(r).data(), extras});
  }
  if (!shards.verbatim()) backend.EncodeAll(up, foreign);
  clock.End(Stage::kEncode);

  // (2) Every shard goes to its owner.
  absl::Status status =
      transport.Start(HashCombine(job.tag, 1), send, shards.incoming())->Wait(job.deadline);
  clock.End(Stage::kExchange);
  if (!status.ok()) return status;

  // (3) Sum in rank order, the own shard as it is; (4) mean, second-hop residual, encode. The owner
  // decodes its own bytes like everyone else: that is what makes replicas bit-identical.
  std::vector<const uint8_t*> wires(n);
  for (int r = 0; r < n; ++r) wires[r] = r == me ? nullptr : shards.incoming()[r].data();
  const MutableBytes result = shards.results()[me];
  backend.Reduce({.up = up,
                  .down = down,
                  .wires = wires,
                  .own = shards.input(me),
                  .scale = job.scale,
                  .residual = shards.residual(me),
                  .out = shards.output(me),
                  .wire_out = shards.verbatim() ? nullptr : result.data(),
                  .draws = shards.draws(down, 0, me)});
  clock.End(Stage::kReduce);

  // (5) Every owner's result goes to everybody.
  std::fill(send.begin(), send.end(), Bytes(result));
  status = transport.Start(HashCombine(job.tag, 2), send, shards.results())->Wait(job.deadline);
  clock.End(Stage::kGather);
  if (!status.ok()) return status;

  // (6) Decode the foreign shards.
  std::vector<DecodeArgs> results;
  for (int r = 0; r < n; ++r) {
    if (r != me) results.push_back({shards.results()[r].data(), shards.output(r)});
  }
  if (!shards.verbatim()) backend.DecodeAll(down, results);
  return absl::OkStatus();
}

absl::Status AllReduceSparse(const ChunkJob& job, const Operands& work, const Backend& backend,
                             Transport& transport, LaneBuffers& buffers, StageClock& clock) {
  const int n = transport.size();
  const int me = transport.rank();
  const CodecSpec& spec = job.codec.up;
  const size_t numel = work.input.numel, bytes = EncodedBytes(spec, numel);
  std::vector<MutableBytes> wires(n);
  for (MutableBytes& wire : wires) wire = buffers.Take(bytes);
  // The result is summed where it goes, if that is fp32.
  const bool direct = work.output.dtype == DType::kF32;
  const std::span<float> sum = direct
                                   ? std::span<float>(static_cast<float*>(work.output.data), numel)
                                   : buffers.TakeOf<float>(numel);

  EncodeExtras extras;
  extras.threshold = job.threshold;
  extras.scratch = buffers.TakeOf<uint32_t>(TopKScratchWords(spec, numel));
  extras.velocity = job.velocity == nullptr ? nullptr : job.velocity + job.chunk->elements.begin;
  extras.momentum = job.momentum.beta;
  extras.nesterov = job.momentum.nesterov;
  backend.Encode(spec, work.input, work.residual, wires[me].data(), extras);
  clock.End(Stage::kEncode);

  const std::vector<Bytes> send(n, wires[me]);
  absl::Status status = transport.Start(HashCombine(job.tag, 1), send, wires)->Wait(job.deadline);
  clock.End(Stage::kGather);
  if (!status.ok()) return status;

  // Everybody adds the same entries in the same order, the own ones as they were sent. Each is
  // scaled, which is less than to scale all elements, most of which are 0.
  std::memset(static_cast<void*>(sum.data()), 0, sum.size_bytes());
  for (int r = 0; r < n; ++r) {
    if (status = CheckWire(spec, wires[r], numel); !status.ok()) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", r, " sent what is no topk shard: ", status.message(),
                       "; look for a network or memory fault on its machine"));
    }
    backend.AddEntries(spec, wires[r].data(), job.scale, sum);
  }
  if (!direct) {
    const auto* values = reinterpret_cast<const uint8_t*>(sum.data());
    backend.Decode({.id = CodecId::kFp32}, values, work.output);
  }
  return absl::OkStatus();
}

// Of dense codecs the own shard's residual is the mean's, and the velocity is all ranks'.
Absence AbsenceFrom(const ChunkJob& job, int rank, LaneBuffers& buffers) {
  Absence absence;
  if (job.absent.empty()) return absence;
  const Chunk& chunk = *job.chunk;
  const std::vector<Range> ranges =
      Overlap(job.absent, chunk.elements, chunk.sparse ? Range{} : chunk.shard(rank));
  const auto add = [&](float* kept) {
    if (kept != nullptr) absence.Add(ranges, {kept + chunk.elements.begin, chunk.numel()}, buffers);
  };
  add(job.residual);
  if (chunk.sparse) add(job.velocity);
  return absence;
}

}  // namespace

absl::Status AllReduceChunk(const ChunkJob& job, const Backend& backend, Transport& transport,
                            LaneBuffers& buffers, StageClock& clock) {
  buffers.Reset();
  Desk desk(job, backend, buffers);
  const Absence absence = AbsenceFrom(job, transport.rank(), buffers);
  if (!buffers.status().ok()) return buffers.status();
  desk.Load();
  absence.Before(backend);
  const auto reduce = job.chunk->sparse ? AllReduceSparse : AllReduceDense;
  const absl::Status status = reduce(job, desk.operands(), backend, transport, buffers, clock);
  absence.After(backend);
  if (status.ok()) desk.Store();
  clock.End(Stage::kDecode);
  return status;
}

}  // namespace thinwire
