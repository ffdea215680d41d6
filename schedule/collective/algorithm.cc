#include "schedule/collective/algorithm.h"

#include <algorithm>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

constexpr size_t kLine = 64;

}  // namespace

MutableBytes Workspace::Take(size_t bytes) {
  if (!grows_) return TakeOfMemory(bytes);
  if (next_ == blocks_.size()) blocks_.emplace_back();
  Block& block = blocks_[next_++];
  if (block.bytes < bytes || block.memory == nullptr) {
    block = {};  // frees the old block first
    block = {std::unique_ptr<uint8_t[]>(new (std::nothrow) uint8_t[bytes + kLine]()), bytes};
    if (block.memory == nullptr) {
      status_ = absl::ResourceExhaustedError(
          absl::StrCat("the host has no memory for ", bytes, " bytes of a chunk; free some, ",
                       "or raise this process's limit (ulimit -v)"));
      return {static_cast<uint8_t*>(nullptr), bytes};
    }
  }
  const size_t skew = -reinterpret_cast<uintptr_t>(block.memory.get()) % kLine;
  return {block.memory.get() + skew, bytes};
}

MutableBytes Workspace::TakeOfMemory(size_t bytes) {
  if (status_.ok() && memory_.size() - used_ < bytes) {
    status_ = absl::InternalError(absl::StrCat("a chunk takes ", used_ + bytes,
                                               " bytes of a device's memory, expected ",
                                               memory_.size(), "; report this with its codec"));
  }
  if (!status_.ok()) return {static_cast<uint8_t*>(nullptr), bytes};
  const MutableBytes taken = memory_.subspan(used_, bytes);
  used_ = std::min(memory_.size(), (used_ + bytes + kLine - 1) / kLine * kLine);
  return taken;
}

std::vector<MutableBytes> Workspace::TakeArray(size_t count, size_t bytes) {
  std::vector<MutableBytes> blocks;
  if (bytes % kLine != 0) {
    for (size_t i = 0; i < count; ++i) blocks.push_back(Take(bytes));
    return blocks;
  }
  const MutableBytes array = Take(count * bytes);
  for (size_t i = 0; i < count; ++i) blocks.push_back({array.data() + i * bytes, bytes});
  return blocks;
}

std::vector<size_t> OwnNothing(Range chunk, int world, size_t) {
  return std::vector<size_t>(world + 1, chunk.end);
}

Range NoSecondHop(const Chunk&, int) { return {}; }

std::vector<PhaseCost> CostsOfOneHop(const Chunk& chunk, const CodecPair& codec) {
  const auto numel = static_cast<double>(chunk.numel());
  const int peers = chunk.world() - 1;
  const auto bytes = static_cast<double>(EncodedBytes(codec.up, chunk.numel()));
  return {{.encoded = numel, .bytes = bytes * peers, .peers = peers},
          {.reduced = numel, .decoded = numel}};
}

ChunkRun::ChunkRun(const ChunkJob& job, Workspace& space)
    : job_(job), space_(space), n_(space.members.size), me_(space.members.rank) {
  space_.Reset();
}

absl::StatusOr<const Hop*> ChunkRun::Advance() {
  if (phase_ == 0) {
    if (!space_.status().ok()) return space_.status();
    for (const Range& kept : Kept()) {
      if (job_.undo == nullptr) break;
      job_.undo->Save(space_.backend, kept, job_.residual, job_.momentum.velocity);
    }
  }
  is_due_ = false;
  if (absl::Status status = Work(phase_++); !status.ok()) return status;
  return is_due_ ? &hop_ : nullptr;
}

void ChunkRun::Exchange(Stage made_in, Stage stage, std::span<const Bytes> send,
                        std::span<const MutableBytes> recv, std::span<const MutableBytes> next) {
  hop_ = {made_in, stage, Tag(++hops_), send, recv};
  if (!next.empty()) hop_.next = {Tag(hops_ + 1), next};
  is_due_ = true;
}

std::span<const Bytes> ChunkRun::Each(std::span<const MutableBytes> blocks) {
  send_.assign(blocks.begin(), blocks.end());
  return send_;
}

std::span<const Bytes> ChunkRun::ToAll(Bytes block) {
  send_.assign(n_, block);
  return send_;
}

std::span<float> ChunkRun::TakeReduceScratch(size_t wires, size_t numel) {
  const size_t floats = space_.backend.ReduceScratchFloats(wires, numel);
  return floats == 0 ? std::span<float>() : space_.TakeOf<float>(floats);
}

std::vector<Range> Overlap(std::span<const Range> ranges, Range within, Range without) {
  std::vector<Range> parts;
  const auto add = [&](size_t begin, size_t end) {
    if (begin < end) parts.push_back({begin - within.begin, end - within.begin});
  };
  for (const Range& range : ranges) {
    const size_t begin = std::max(range.begin, within.begin);
    const size_t end = std::min(range.end, within.end);
    add(begin, std::min(end, std::max(begin, without.begin)));
    add(std::max(begin, without.end), end);
  }
  return parts;
}

Operands::Operands(const ChunkJob& job, Workspace& space)
    : job_(job), space_(space), numel_(job.chunk->numel()) {
  const size_t begin = job.chunk->elements.begin;
  const bool own_momentum =
      job.momentum.velocity != nullptr && !job.chunk->algorithm->owns_momentum;
  if (job.residual != nullptr) residual_ = job.residual + begin;
  if (own_momentum) {
    momentum_ = job.momentum.From(begin);
    with_momentum_ = space.TakeOf<float>(numel_);
    input_ = output_ = {with_momentum_.data(), numel_};
    // The new m is the result itself.
    if (is_whole() && job.output.dtype == DType::kF32 && !job.momentum.nesterov) {
      output_ = job.output.Slice(job.chunk->pieces[0].begin, numel_);
    }
  } else if (!is_whole()) {
    const MutableBytes copy = space.Take(numel_ * SizeOf(job.input.dtype));
    input_ = output_ = {copy.data(), numel_, job.input.dtype};
    copies_ = true;
  } else {
    const size_t at = job.chunk->pieces[0].begin;
    input_ = job.input.Slice(at, numel_);
    output_ = job.output.Slice(at, numel_);
  }
  FindAbsent();
}

// The second hop's residual is the mean's, and a dense velocity all ranks': neither is set aside.
void Operands::FindAbsent() {
  if (job_.absent.empty()) return;
  const Chunk& chunk = *job_.chunk;
  const Range second = chunk.algorithm->second_hop(chunk, space_.members.rank);
  const std::vector<Range> ranges = Overlap(job_.absent, chunk.elements, second);
  const auto add = [&](float* kept) {
    for (const Range& range : ranges) {
      const size_t count = range.end - range.begin;
      absent_.push_back(
          {{kept + chunk.elements.begin + range.begin, count}, space_.TakeOf<float>(count)});
    }
  };
  if (job_.residual != nullptr) add(job_.residual);
  float* const velocity = job_.momentum.velocity;
  if (velocity != nullptr && !adds_momentum()) add(velocity);
}

// Uses only sums, which every backend has: -1 * kept + aside is 0; 1 * kept + aside restores it.
void Operands::SetAbsentAside() {
  const Backend& backend = space_.backend;
  is_aside_ = true;
  for (const Absent& absent : absent_) {
    backend.Copy(absent.aside.data(), absent.kept.data(), absent.kept.size_bytes());
    backend.Accumulate({absent.aside.data(), absent.aside.size()}, -1.0f, absent.kept, absent.kept);
  }
}

void Operands::RestoreAbsent() {
  if (!std::exchange(is_aside_, false)) return;
  for (const Absent& absent : absent_) {
    space_.backend.Accumulate({absent.aside.data(), absent.aside.size()}, 1.0f, absent.kept,
                              absent.kept);
  }
}

template <typename Visit>
void Operands::ForEachPiece(const TensorView& bucket, Visit visit) {
  size_t at = 0;
  for (const Range& piece : job_.chunk->pieces) {
    const size_t count = piece.end - piece.begin;
    visit(bucket.Slice(piece.begin, count), at);
    at += count;
  }
}

void Operands::Load(Range needed) {
  const Backend& backend = space_.backend;
  loaded_ = is_whole() ? needed : Range{0, numel_};
  ForEachPiece(job_.input, [&](TensorView piece, size_t at) {
    if (copies_) backend.Copy(input_.Slice(at, 0).data, piece.data, piece.bytes());
    if (!adds_momentum()) return;
    if (is_whole()) {
      at = loaded_.begin;
      piece = piece.Slice(at, loaded_.end - at);
    }
    backend.Accumulate(piece, momentum_.beta, {momentum_.velocity + at, piece.numel},
                       with_momentum_.subspan(at, piece.numel));
  });
  SetAbsentAside();
}

EncodeArgs Operands::Encoding(Range elements) const {
  const size_t begin = elements.begin, numel = elements.end - begin;
  EncodeArgs encoding{.gradient = input_.Slice(begin, numel)};
  if (residual_ != nullptr) encoding.residual = residual_ + begin;
  const bool is_loaded = loaded_.begin <= begin && elements.end <= loaded_.end;
  if (adds_momentum() && !is_loaded) {  // on a device: saves a pass over these elements
    encoding.gradient = job_.input.Slice(job_.chunk->pieces[0].begin + begin, numel);
    encoding.momentum = momentum_.From(begin);
  }
  return encoding;
}

// `m` is the new momentum of elements [offset, offset + m.numel); it may lie in `output` already.
void Operands::EndMomentum(TensorView m, TensorView output, size_t offset) {
  const std::span<float> reduced(static_cast<float*>(m.data), m.numel);
  const Momentum momentum = momentum_.From(offset);
  if (m.data == output.data) {
    space_.backend.CopyFinite(reduced, {momentum.velocity, m.numel});
  } else {
    space_.backend.EndMomentum(momentum, reduced, output);
  }
}

void Operands::Store() {
  const Backend& backend = space_.backend;
  RestoreAbsent();
  ForEachPiece(job_.output, [&](TensorView piece, size_t at) {
    if (adds_momentum()) EndMomentum(output_.Slice(at, piece.numel), piece, at);
    if (copies_) backend.Copy(piece.data, output_.Slice(at, 0).data, piece.bytes());
  });
}

}  // namespace thinwire
