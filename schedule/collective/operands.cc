#include "schedule/collective/operands.h"

namespace thinwire {

Operands::Operands(const ChunkJob& job, const Bench& bench)
    : job_(job), bench_(bench), numel_(job.chunk->numel()) {
  const size_t begin = job.chunk->elements.begin;
  const bool own_momentum =
      job.momentum.velocity != nullptr && !job.chunk->algorithm->owns_momentum();
  if (job.residual != nullptr) residual_ = job.residual + begin;
  if (own_momentum) {
    momentum_.emplace(job.momentum.From(begin), bench.scratch.TakeOf<float>(numel_));
    input_ = output_ = {momentum_->reduced().data(), numel_};
    // The new m is the result itself.
    if (is_whole() && job.output.dtype == DType::kF32 && !job.momentum.nesterov) {
      output_ = job.output.Slice(job.chunk->pieces[0].begin, numel_);
    }
  } else if (!is_whole()) {
    const MutableBytes copy = bench.scratch.Take(numel_ * SizeOf(job.input.dtype));
    input_ = output_ = {copy.data(), numel_, job.input.dtype};
    copies_ = true;
  } else {
    const size_t at = job.chunk->pieces[0].begin;
    input_ = job.input.Slice(at, numel_);
    output_ = job.output.Slice(at, numel_);
  }
  FindAbsent();
}

// The second hop's residual is the mean's, and a dense velocity is all ranks'; both go on.
void Operands::FindAbsent() {
  if (job_.absent.empty()) return;
  const Chunk& chunk = *job_.chunk;
  const Range second = chunk.algorithm->SecondHop(chunk, bench_.members.rank);
  const std::vector<Range> ranges = Overlap(job_.absent, chunk.elements, second);
  const auto add = [&](float* kept) {
    absence_.Add(ranges, {kept + chunk.elements.begin, numel_}, bench_.scratch);
  };
  if (job_.residual != nullptr) add(job_.residual);
  float* const velocity = job_.momentum.velocity;
  if (velocity != nullptr && !momentum_.has_value()) add(velocity);
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
  const Backend& backend = bench_.backend;
  loaded_ = is_whole() ? needed : Range{0, numel_};
  ForEachPiece(job_.input, [&](TensorView piece, size_t at) {
    if (copies_) backend.Copy(input_.Slice(at, 0).data, piece.data, piece.bytes());
    if (!momentum_.has_value()) return;
    if (is_whole()) {
      at = loaded_.begin;
      piece = piece.Slice(at, loaded_.end - at);
    }
    momentum_->Before(backend, piece, at);
  });
  absence_.SetAside(backend);
}

EncodeArgs Operands::Encoding(Range elements) const {
  const size_t begin = elements.begin, numel = elements.end - begin;
  EncodeArgs encoding{.gradient = input_.Slice(begin, numel)};
  if (residual_ != nullptr) encoding.residual = residual_ + begin;
  const bool is_loaded = loaded_.begin <= begin && elements.end <= loaded_.end;
  if (momentum_.has_value() && !is_loaded) {
    encoding.gradient = job_.input.Slice(job_.chunk->pieces[0].begin + begin, numel);
    momentum_->InEncoding(begin, &encoding);
  }
  return encoding;
}

void Operands::Store() {
  const Backend& backend = bench_.backend;
  absence_.Restore(backend);
  ForEachPiece(job_.output, [&](TensorView piece, size_t at) {
    if (momentum_.has_value()) {
      momentum_->After(backend, output_.Slice(at, piece.numel), piece, at);
    }
    if (copies_) backend.Copy(piece.data, output_.Slice(at, 0).data, piece.bytes());
  });
}

}  // namespace thinwire
