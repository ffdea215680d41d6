// The allreduce of a chunk along the rows and then the columns of a grid of ranks, in four hops. A
// column's part of the chunk is cut into one shard for each of its ranks.
//   (1) encode the other columns' parts, with the first-hop residuals; each goes along the row;
//   (2) sum this column's part over the row, in rank order and fp32; encode the other rows'
//       shards of that sum, with residuals; each goes along the column;
//   (3) sum this rank's shard over the column; mean, second-hop residual, encode; to the column;
//   (4) the column's encoded shards, unchanged, to all of the row;
//   (5) decode all shards, this rank's too.
// All ranks decode the bytes that the owner made in (3), so replicas are bit-identical.
//
// A rank sends as many bytes as in two hops: (c - 1)/c of the chunk along the row and (r - 1)/(r c)
// along the column are (n - 1)/n of it, in each direction; but in 2 (r + c - 2) messages in place
// of 2 (n - 1). (1) and (2) encode different elements, and both losses are in units of the gradient
// and enter the same sum in the next step. So an element has one residual on a rank, of the second
// hop in the rank's own shard and of the first hop elsewhere, and error feedback ignores grids.
//
// In a hierarchy a row is a node, whose links are faster than those between nodes. There (1) sends
// uncompressed elements, so only (2) and (3) round, like two hops between the nodes. A rank sends
// (r - 1)/(r c) of the chunk to other nodes in each direction, in place of (n - c)/n with two hops:
// c times less. The residuals of other columns' parts are then zero, unless another layout has left
// some, which (1) adds to the elements. (4) stays encoded, since that is less to move, and all
// ranks decode the same bytes.
#include <algorithm>
#include <vector>

#include "schedule/collective/algorithm.h"
#include "schedule/collective/partition.h"

namespace thinwire {
namespace {

// The bytes that go to each rank, and those that come from it.
struct Blocks {
  std::vector<Bytes> send;
  std::vector<MutableBytes> recv;
};

// How elements go along a row in (1).
enum class Rows { kEncoded, kLossless };

class TwoLevelRun final : public ChunkRun {
 public:
  TwoLevelRun(const ChunkJob& job, Workspace& space, Rows rows)
      : ChunkRun(job, space),
        grid_(GridOf(*job.chunk)),
        row_(grid_.row(me_)),
        column_(grid_.column(me_)),
        rows_(rows),
        operands_(job_, space_),
        row_codec_(rows_ == Rows::kEncoded ? job.codec.up : LosslessSpec(operands_.input().dtype)),
        sum_(SumRoom()),
        scratch_(TakeReduceScratch(std::max(grid_.rows, grid_.columns), sum_.size())) {
    for (Blocks& blocks : blocks_) {
      blocks.send.resize(space.members.size);
      blocks.recv.resize(space.members.size);
    }
    TakeAlongTheRow();
    TakeAlongTheColumn();
    TakeResults();
  }

  // Copying uncompressed elements early would delay the sum.
  Reception first() const override {
    return rows_ == Rows::kEncoded ? Reception{Tag(1), blocks_[0].recv} : Reception();
  }

 private:
  absl::Status Work(int phase) override {
    switch (phase) {
      case 0: EncodeParts(); break;
      case 1: ReducePart(); break;
      case 2: ReduceShard(); break;
      case 3: Next(3, Stage::kReduce, Stage::kGather); break;
      default: DecodeShards();
    }
    return absl::OkStatus();
  }

  void EncodeParts() {
    const size_t numel = operands_.input().numel;
    const bool verbatim = IsVerbatim(row_codec_, operands_.input().dtype);
    const Range needed = verbatim ? Range{0, numel} : Part(column_);
    operands_.Load(needed);
    const bool as_they_lie = GoAsTheyLie();
    std::vector<EncodeArgs> parts;
    for (int c = 0; c < grid_.columns; ++c) {
      if (c == column_) continue;
      if (as_they_lie) {
        blocks_[0].send[grid_.rank(row_, c)] = BytesOf(Slice(operands_.input(), Part(c)));
      } else {
        parts.push_back(
            Encoding(operands_.Encoding(Part(c)), row_codec_, Part(c), outgoing_parts_[c]));
      }
    }
    space_.backend.EncodeAll(row_codec_, parts);
    Next(0, Stage::kEncode, Stage::kExchange);
  }

  // Sums are fp32 whatever the input is, so only the codec rounds them.
  void ReducePart() {
    const Range part = Part(column_);
    const CodecSpec fp32 = LosslessSpec(DType::kF32);
    TensorView own = Slice(operands_.input(), part);
    if (own.dtype != DType::kF32) {
      space_.backend.Encode(fp32, own, nullptr, reinterpret_cast<uint8_t*>(sum_.data()));
      own = {sum_.data(), sum_.size()};
    }
    std::vector<const uint8_t*> wires;
    for (int c = 0; c < grid_.columns; ++c) {
      wires.push_back(WireFrom(blocks_[0], grid_.rank(row_, c)));
    }
    space_.backend.Reduce({.up = row_codec_,
                           .down = fp32,
                           .wires = wires,
                           .own = own,
                           .out = {sum_.data(), sum_.size()},
                           .scratch = scratch_});
    std::vector<EncodeArgs> shards;
    for (int r = 0; r < grid_.rows; ++r) {
      if (r == row_) continue;
      const Range shard = Shard(r, column_);
      const EncodeArgs sum{.gradient = SumOf(shard), .residual = Residual(shard)};
      shards.push_back(Encoding(sum, job_.codec.up, shard, outgoing_shards_[r]));
    }
    space_.backend.EncodeAll(job_.codec.up, shards);
    Next(1, Stage::kReduce, Stage::kExchange);
  }

  void ReduceShard() {
    const Range shard = Shard(row_, column_);
    std::vector<const uint8_t*> wires;
    for (int r = 0; r < grid_.rows; ++r) {
      wires.push_back(WireFrom(blocks_[1], grid_.rank(r, column_)));
    }
    const CodecSpec& down = job_.codec.down;
    space_.backend.Reduce({.up = job_.codec.up,
                           .down = down,
                           .wires = wires,
                           .own = SumOf(shard),
                           .scale = job_.scale,
                           .residual = Residual(shard),
                           .out = SumOf(shard),
                           .wire_out = results_[grid_.shard(row_, column_)].data(),
                           .draws = DrawsOf(job_, down, 0, job_.chunk->codec_offset + shard.begin),
                           .scratch = scratch_});
    Next(2, Stage::kReduce, Stage::kGather);
  }

  void DecodeShards() {
    std::vector<DecodeArgs> shards;
    for (int s = 0; s < space_.members.size; ++s) {
      shards.push_back({results_[s].data(), Slice(operands_.output(), ShardNumber(s))});
    }
    space_.backend.DecodeAll(job_.codec.down, shards);
    operands_.Store();
  }

  // The hop after a phase. The blocks of the hop after it may come early: they have their own
  // memory.
  void Next(int phase, Stage made_in, Stage stage) {
    const Blocks& blocks = blocks_[phase];
    const bool last = phase + 1 == kHops;
    Exchange(made_in, stage, blocks.send, blocks.recv,
             last ? std::span<const MutableBytes>() : blocks_[phase + 1].recv);
  }

  // Ranges are relative to the chunk's start.
  Range FromBegin(Range range) const {
    const size_t begin = job_.chunk->elements.begin;
    return {range.begin - begin, range.end - begin};
  }
  Range ShardNumber(int s) const { return FromBegin(job_.chunk->shard(s)); }
  Range Shard(int row, int column) const { return ShardNumber(grid_.shard(row, column)); }
  Range Part(int column) const { return FromBegin(grid_.part(*job_.chunk, column)); }

  static size_t Numel(Range range) { return range.end - range.begin; }
  static TensorView Slice(const TensorView& chunk, Range range) {
    return chunk.Slice(range.begin, Numel(range));
  }
  TensorView SumOf(Range shard) const {
    return {sum_.data() + (shard.begin - Part(column_).begin), Numel(shard)};
  }
  float* Residual(Range range) const {
    return operands_.residual() == nullptr ? nullptr : operands_.residual() + range.begin;
  }
  // A rank encodes an element once on its way to the owner, either its own value or its row's sum;
  // so the element's index alone gives distinct draws.
  EncodeArgs Encoding(EncodeArgs values, const CodecSpec& spec, Range range,
                      MutableBytes wire) const {
    values.draws = DrawsOf(job_, spec, me_ + 1, job_.chunk->codec_offset + range.begin);
    values.wire = wire.data();
    return values;
  }
  // The sum may use the memory of the results, which nothing else uses before they are decoded.
  std::span<float> SumRoom() {
    const TensorView results = Slice(operands_.output(), Part(column_));
    if (results.dtype != DType::kF32) return space_.TakeOf<float>(results.numel);
    return {static_cast<float*>(results.data), results.numel};
  }
  // Verbatim elements are sent directly from the input, if no residual is to be added. Residuals of
  // other columns are zero after a step; only those of absent parameters, set aside, return.
  bool GoAsTheyLie() const {
    if (!IsVerbatim(row_codec_, operands_.input().dtype)) return false;
    const float* const residual = operands_.residual();
    if (residual == nullptr) return true;
    const Range mine = Part(column_);
    const std::span<const float> others[] = {
        {residual, mine.begin}, {residual + mine.end, operands_.input().numel - mine.end}};
    return space_.backend.AreZero(others, job_.absent.empty() ? job_.carried : nullptr);
  }
  const uint8_t* WireFrom(const Blocks& blocks, int rank) const {
    return rank == me_ ? nullptr : blocks.recv[rank].data();
  }

  // Sends the other columns' parts, and receives this column's part.
  void TakeAlongTheRow() {
    outgoing_parts_.resize(grid_.columns);
    for (int c = 0; c < grid_.columns; ++c) {
      if (c == column_) continue;
      const int peer = grid_.rank(row_, c);
      blocks_[0].send[peer] = outgoing_parts_[c] = PartRoom(c);
      blocks_[0].recv[peer] = PartRoom(column_);
    }
  }
  // Sends the shards of this column's sum, and receives this rank's shard.
  void TakeAlongTheColumn() {
    outgoing_shards_.resize(grid_.rows);
    for (int r = 0; r < grid_.rows; ++r) {
      if (r == row_) continue;
      const int peer = grid_.rank(r, column_);
      blocks_[1].send[peer] = outgoing_shards_[r] = Room(job_.codec.up, Shard(r, column_));
      blocks_[1].recv[peer] = Room(job_.codec.up, Shard(row_, column_));
    }
  }
  // A column's results are contiguous, since they go along the row as one block.
  void TakeResults() {
    results_.resize(space_.members.size);
    std::vector<MutableBytes> columns;
    for (int c = 0; c < grid_.columns; ++c) columns.push_back(TakeColumn(c));
    for (int r = 0; r < grid_.rows; ++r) {
      if (r == row_) continue;
      const int peer = grid_.rank(r, column_);
      blocks_[2].send[peer] = results_[grid_.shard(row_, column_)];
      blocks_[2].recv[peer] = results_[grid_.shard(r, column_)];
    }
    for (int c = 0; c < grid_.columns; ++c) {
      if (c == column_) continue;
      blocks_[3].send[grid_.rank(row_, c)] = columns[column_];
      blocks_[3].recv[grid_.rank(row_, c)] = columns[c];
    }
  }
  MutableBytes TakeColumn(int column) {
    size_t bytes = 0;
    for (int r = 0; r < grid_.rows; ++r) bytes += ResultBytes(r, column);
    const MutableBytes all = space_.Take(bytes);
    size_t at = 0;
    for (int r = 0; r < grid_.rows; ++r) {
      results_[grid_.shard(r, column)] = {all.data() + at, ResultBytes(r, column)};
      at += ResultBytes(r, column);
    }
    return all;
  }
  size_t ResultBytes(int row, int column) const {
    return EncodedBytes(job_.codec.down, Numel(Shard(row, column)));
  }
  MutableBytes Room(const CodecSpec& spec, Range range) const {
    return space_.Take(EncodedBytes(spec, Numel(range)));
  }
  // Without padding if the elements are verbatim, since they have none.
  MutableBytes PartRoom(int column) const {
    const MutableBytes room = Room(row_codec_, Part(column));
    const bool verbatim = IsVerbatim(row_codec_, operands_.input().dtype);
    return verbatim ? room.first(Numel(Part(column)) * sizeof(float)) : room;
  }

  static constexpr int kHops = 4;

  const Grid grid_;
  const int row_, column_;
  const Rows rows_;
  Operands operands_;
  const CodecSpec row_codec_;
  const std::span<float> sum_;                 // over the row, of this column's part
  const std::span<float> scratch_;             // for both reductions
  std::vector<MutableBytes> outgoing_parts_;   // by column, encoded by this rank
  std::vector<MutableBytes> outgoing_shards_;  // by row, encoded by this rank
  std::vector<MutableBytes> results_;          // by number of the shard, encoded by its owner
  Blocks blocks_[kHops];
};

Range OwnShard(const Chunk& chunk, int rank) {
  const Grid grid = GridOf(chunk);
  return chunk.shard(grid.shard(grid.row(rank), grid.column(rank)));
}

// Along a row go the other columns' parts of a chunk; along a column a part's other shards.
template <Rows kRows>
std::vector<PhaseCost> CostsBy(const Chunk& chunk, const CodecPair& codec) {
  using To = PhaseCost::To;
  const Grid grid = GridOf(chunk);
  const auto numel = static_cast<double>(chunk.numel()), part = numel / grid.columns;
  const int of_row = grid.columns - 1, of_column = grid.rows - 1;
  const double row = static_cast<double>(of_row) / grid.columns;
  const double column = static_cast<double>(of_column) / chunk.world();
  const auto up = static_cast<double>(EncodedBytes(codec.up, chunk.numel()));
  const auto down = static_cast<double>(EncodedBytes(codec.down, chunk.numel()));
  const bool encodes = kRows == Rows::kEncoded;
  const To along = encodes ? To::kSome : To::kNode;
  return {{.encoded = encodes ? numel : 0.0,
           .bytes = (encodes ? up : sizeof(float) * numel) * row,
           .peers = of_row,
           .to = along},
          {.encoded = part,
           .reduced = numel,
           .bytes = up * column,
           .peers = of_column,
           .to = To::kSome},
          {.reduced = part, .bytes = down * column, .peers = of_column, .to = To::kSome},
          {.bytes = down * row, .peers = of_row, .to = along},
          {.decoded = numel}};
}

}  // namespace

const Algorithm& TwoLevel() {
  static const Algorithm algorithm = {.name = "two-level",
                                      .hops = 4,
                                      .keeps_residuals = true,
                                      .begin = BeginRun<TwoLevelRun, Rows::kEncoded>,
                                      .shard_bounds = TwoHop().shard_bounds,
                                      .second_hop = OwnShard,
                                      .costs = CostsBy<Rows::kEncoded>};
  return algorithm;
}

const Algorithm& Hierarchical() {
  static const Algorithm algorithm = {.name = "hierarchical",
                                      .hops = 4,
                                      .keeps_residuals = true,
                                      .carries = true,
                                      .begin = BeginRun<TwoLevelRun, Rows::kLossless>,
                                      .shard_bounds = TwoHop().shard_bounds,
                                      .second_hop = OwnShard,
                                      .costs = CostsBy<Rows::kLossless>};
  return algorithm;
}

}  // namespace thinwire
