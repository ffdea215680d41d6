#include "compress/cpu_reduce.h"

#include <algorithm>
#include <cstring>

#include "compress/simd_kernels.h"
#include "compress/stages.h"

namespace thinwire {
CpuReduction::CpuReduction(const ReduceArgs& args)
    : args_(args),
      own_(args.own.data != nullptr ? args.own : args.out),  // which no wire asks for then
      up_(args.up, args.own.numel),
      down_(args.down, args.own.numel, args.draws),
      from_(InfoOf(args.up.id).simd.dense),
      to_(InfoOf(args.down.id).simd.dense),
      direct_(args.own.dtype == DType::kF32) {  // which `out` has as well
  if (from_.begin != nullptr) walks_.resize(args.wires.size());
}

void CpuReduction::Run() {
  if (args_.wire_out != nullptr) ZeroPadding(down_.layout, args_.wire_out);
  if (to_.heads != nullptr && args_.wire_out != nullptr) {
    ReduceWidths();
  } else {
    ReduceAll();
  }
}

// Codes need nothing but their own block. In one piece where no stage buffer is needed.
void CpuReduction::ReduceAll() {
  BeginWalks();
  const size_t numel = own_.numel, step = direct_ ? numel : kStage;
  for (size_t begin = 0; begin < numel; begin += step) {
    const size_t count = std::min(step, numel - begin);
    const Piece up(up_, begin, count), down(down_, begin, count);
    const TensorView own = own_.Slice(begin, count), out = args_.out.Slice(begin, count);
    if (direct_) {
      ReducePiece(up, down, Floats(own), Floats(out));
      continue;
    }
    StageBuffer values;
    ToFloats(own, values.data());
    ReducePiece(up, down, values.data(), values.data());
    FromFloats(values.data(), out);
  }
}

// Codes need all heads: what is encoded is made once for the heads, and waits in the residual, or
// in `out`. Where there is no residual, nor fp32 in `out`, it is made again for the codes.
void CpuReduction::ReduceWidths() {
  const size_t numel = own_.numel;
  StageBuffer mean;
  BeginWalks();
  for (size_t begin = 0; begin < numel; begin += kStage) {
    const size_t count = std::min(kStage, numel - begin);
    SumOfTensor(begin, count, mean.data());
    if (direct_ && args_.residual == nullptr) {
      std::memcpy(Floats(args_.out) + begin, mean.data(), count * sizeof(float));
    }
    to_.heads({down_, begin, count}, mean.data(), ResidualAt(begin), args_.wire_out);
  }
  BeginWalks();
  Walk encoded;
  to_.begin(down_, args_.wire_out, &encoded);
  Walk decoded = encoded;
  for (size_t begin = 0; begin < numel; begin += kStage) {
    const size_t count = std::min(kStage, numel - begin);
    float* const values = direct_ ? Floats(args_.out) + begin : mean.data();
    if (args_.residual != nullptr) {
      to_.encode_and_decode({down_, begin, count, &encoded}, ResidualAt(begin), args_.wire_out,
                            values);
    } else {
      if (!direct_) SumOfTensor(begin, count, values);
      to_.encode({down_, begin, count, &encoded}, values, nullptr, args_.wire_out);
      to_.decode({down_, begin, count, &decoded}, args_.wire_out, values);
    }
    if (!direct_) FromFloats(values, args_.out.Slice(begin, count));
  }
  ZeroBehind(down_, encoded, args_.wire_out);
}

void CpuReduction::ReducePiece(const Piece& up, const Piece& down, const float* own, float* out) {
  size_t done = 0;
  if (from_.reduce != nullptr) {
    done = from_.reduce(up, down,
                        {.wires = args_.wires,
                         .own = own,
                         .scale = args_.scale,
                         .residual = ResidualAt(up.begin),
                         .out = out,
                         .wire_out = args_.wire_out});
  }
  for (; done < up.numel; done += kStage) {
    const size_t count = std::min(kStage, up.numel - done);
    ReduceStage({up_, up.begin + done, count}, {down_, up.begin + done, count}, own + done,
                out + done);
  }
}

// One rank after the other: the combinations of codecs and options that have no loop, and what is
// behind the last full block or vector.
void CpuReduction::ReduceStage(const Piece& up, const Piece& down, const float* own, float* out) {
  StageBuffer sum;
  Sum(up, own, sum.data());
  if (args_.wire_out == nullptr) {
    std::memcpy(out, sum.data(), up.numel * sizeof(float));
    return;
  }
  to_.encode(down, sum.data(), ResidualAt(down.begin), args_.wire_out);
  to_.decode(down, args_.wire_out, out);
}

// The scaled sum in rank order.
void CpuReduction::Sum(const Piece& up, const float* own, float* sum) {
  for (size_t r = 0; r < args_.wires.size(); ++r) {
    if (args_.wires[r] != nullptr) {
      const Piece piece(up_, up.begin, up.numel, walks_.empty() ? nullptr : &walks_[r]);
      (r == 0 ? from_.decode : from_.decode_add)(piece, args_.wires[r], sum);
    } else if (r == 0) {
      std::memcpy(sum, own, up.numel * sizeof(float));
    } else {
      simd::Add(sum, own, up.numel);
    }
  }
  simd::Scale(sum, args_.scale, up.numel);
}

void CpuReduction::SumOfTensor(size_t begin, size_t count, float* sum) {
  const TensorView own = own_.Slice(begin, count);
  if (direct_) return Sum({up_, begin, count}, Floats(own), sum);
  StageBuffer values;
  ToFloats(own, values.data());
  Sum({up_, begin, count}, values.data(), sum);
}

void CpuReduction::BeginWalks() {
  for (size_t r = 0; r < walks_.size(); ++r) {
    if (args_.wires[r] != nullptr) from_.begin(up_, args_.wires[r], &walks_[r]);
  }
}

float* CpuReduction::ResidualAt(size_t begin) const {
  return args_.residual == nullptr ? nullptr : args_.residual + begin;
}

}  // namespace thinwire
