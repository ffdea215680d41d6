#include "schedule/chunk_allreduce.h"

#include "schedule/hash.h"

namespace thinwire {
namespace {

// Where the wire bytes of each shard lie. fp32 of an f32 tensor needs no copy: there the wire bytes
// are the tensor's own, without the padding.
class Wires {
 public:
  Wires(const ChunkJob& job, int rank, int size, LaneBuffers& buffers)
      : job_(job),
        buffers_(buffers),
        rank_(rank),
        verbatim_(job.codec.id == CodecId::kFp32 && job.input.dtype == DType::kF32) {
    size_t room = 0;
    for (int r = 0; r < size; ++r) {
      room += 2 * LaneBuffers::Rounded(Size(r)) + LaneBuffers::Rounded(Size(rank));
    }
    buffers.Reset(room);
  }

  bool verbatim() const { return verbatim_; }

  TensorView Part(TensorView bucket, int r) const {
    const Range shard = job_.chunk->shard(r);
    return bucket.Slice(shard.begin, shard.end - shard.begin);
  }
  float* Residual(int r) const {
    return job_.residual == nullptr ? nullptr : job_.residual + job_.chunk->shard(r).begin;
  }
  // Room for the encoded shard of rank r: the tensor's memory if verbatim, else of the lane.
  MutableBytes Of(TensorView bucket, int r) {
    if (!verbatim_) return buffers_.Take(Size(r));
    const TensorView part = Part(bucket, r);
    return {static_cast<uint8_t*>(part.data), part.bytes()};
  }
  // Room for what a peer sends for the own shard.
  MutableBytes Incoming() { return buffers_.Take(Size(rank_)); }

 private:
  size_t Size(int r) const {
    const Range shard = job_.chunk->shard(r);
    const size_t numel = shard.end - shard.begin;
    return verbatim_ ? numel * sizeof(float) : EncodedBytes(job_.codec, numel);
  }

  const ChunkJob& job_;
  LaneBuffers& buffers_;
  const int rank_;
  const bool verbatim_;
};

}  // namespace

void LaneBuffers::Reset(size_t bytes) {
  used_ = 0;
  if (memory_.size() < bytes + 64) memory_.resize(bytes + 64);
}

MutableBytes LaneBuffers::Take(size_t bytes) {
  const size_t skew = 64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64;
  const MutableBytes taken(memory_.data() + skew + used_, bytes);
  used_ += Rounded(bytes);
  return taken;
}

absl::Status AllReduceChunk(const ChunkJob& job, const Backend& backend, Transport& transport,
                            LaneBuffers& buffers, StageClock& clock) {
  const int n = transport.size();
  const int me = transport.rank();
  Wires wires(job, me, n, buffers);
  std::vector<Bytes> send(n);
  std::vector<MutableBytes> recv(n);

  // (1) Encode the n - 1 foreign shards, with the first-hop residuals.
  for (int r = 0; r < n; ++r) {
    if (r == me) continue;
    const MutableBytes wire = wires.Of(job.input, r);
    if (!wires.verbatim()) {
      backend.Encode(job.codec, wires.Part(job.input, r), wires.Residual(r), wire.data());
    }
    send[r] = wire;
    recv[r] = wires.Incoming();
  }
  clock.End(Stage::kEncode);

  // (2) Every shard goes to its owner.
  absl::Status status = transport.Start(HashCombine(job.tag, 1), send, recv)->Wait(job.deadline);
  clock.End(Stage::kExchange);
  if (!status.ok()) return status;

  // (3) Sum in rank order, the own shard as it is; (4) mean, second-hop residual, encode. The owner
  // decodes its own bytes like everyone else: that is what makes replicas bit-identical.
  std::vector<const uint8_t*> incoming(n);
  for (int r = 0; r < n; ++r) incoming[r] = r == me ? nullptr : recv[r].data();
  const MutableBytes result = wires.Of(job.output, me);
  backend.Reduce({.up = job.codec,
                  .down = job.codec,
                  .wires = incoming,
                  .own = wires.Part(job.input, me),
                  .scale = job.scale,
                  .residual = wires.Residual(me),
                  .out = wires.Part(job.output, me),
                  .wire_out = wires.verbatim() ? nullptr : result.data()});
  clock.End(Stage::kReduce);

  // (5) Every owner's result goes to everybody.
  for (int r = 0; r < n; ++r) {
    if (r == me) continue;
    send[r] = result;
    recv[r] = wires.Of(job.output, r);
  }
  status = transport.Start(HashCombine(job.tag, 2), send, recv)->Wait(job.deadline);
  clock.End(Stage::kGather);
  if (!status.ok()) return status;

  // (6) Decode the foreign shards.
  for (int r = 0; r < n; ++r) {
    if (r == me || wires.verbatim()) continue;
    backend.Decode(job.codec, recv[r].data(), wires.Part(job.output, r));
  }
  clock.End(Stage::kDecode);
  return absl::OkStatus();
}

}  // namespace thinwire
