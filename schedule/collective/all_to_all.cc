// An all-to-all: part r of a rank's elements goes to rank r unchanged, and is stored there as the
// part with the sender's number. Nothing is added, rounded or kept, whatever the codec. Blocks go
// directly between the callers' buffers, so input and output must not overlap.
#include <vector>

#include "schedule/collective/algorithm.h"

namespace thinwire {
namespace {

class AllToAllRun final : public ChunkRun {
 public:
  AllToAllRun(const ChunkJob& job, Workspace& space) : ChunkRun(job, space) {
    for (int r = 0; r < n_; ++r) {
      const bool own = r == me_;
      outgoing_.push_back(own ? MutableBytes() : BytesOf(PieceOf(job_.input, r)));
      incoming_.push_back(own ? MutableBytes() : BytesOf(PieceOf(job_.output, r)));
    }
  }

 private:
  absl::Status Work(int phase) override {
    if (phase == 0) {
      Exchange(Stage::kEncode, Stage::kExchange, Each(outgoing_), incoming_);
    } else {
      const TensorView own = PieceOf(job_.input, me_);
      space_.backend.Copy(PieceOf(job_.output, me_).data, own.data, own.bytes());
    }
    return absl::OkStatus();
  }

  TensorView PieceOf(TensorView whole, int r) const {
    const Range piece = job_.chunk->pieces[r];
    return whole.Slice(piece.begin, piece.end - piece.begin);
  }

  std::vector<MutableBytes> outgoing_, incoming_;  // by rank
};

std::vector<PhaseCost> CostsOfCopy(const Chunk& chunk, const CodecPair&) {
  const auto bytes = static_cast<double>(chunk.numel() * sizeof(float));
  const int peers = chunk.world() - 1;
  return {{.bytes = bytes * peers / chunk.world(), .peers = peers}, {}};
}

}  // namespace

const Algorithm& AllToAll() {
  static constexpr Algorithm kAlgorithm = {
      .name = "all-to-all", .hops = 1, .begin = BeginRun<AllToAllRun>, .costs = CostsOfCopy};
  return kAlgorithm;
}

}  // namespace thinwire
